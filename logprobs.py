"""Log-probabilities of given tokens, without logits in memory. Copy this file: it needs no other.

    logprobs = model(input_ids, targets, mask)  # all (B, T); zero where the mask is false

`model` is a `LogprobModel.checked(AutoModelForCausalLM.from_pretrained(..., dtype="float32"))`. The
targets are the tokens that follow `input_ids`. Without logits the model cannot `generate`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # A chunk takes 8 or 256 MiB in fp32.
CHECK_TOKENS = 64  # random tokens on which a model is compared with its own logits
MAX_GAP = 1e-3  # nats a token, on average; rounding in fp32 gives 1e-5, a forgotten bias 0.35
MAX_MOVED = 1e-5  # nats by which a token may move those before it; a causal model gives 0


class LogprobHead(torch.nn.Module):
    """Takes the place of `lm_head`: hidden states in, log-probabilities out, in one module call."""

    def __init__(self, head: torch.nn.Linear, scale: float = 1.0, cap: float | None = None):
        super().__init__()
        self.weight, self.bias = head.weight, head.bias  # Tied ones stay tied.
        self.scale, self.cap = scale, cap

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """log softmax(logits / temperature)[target]: (N, H), (N,) -> (N,) fp32."""
        return ChunkedLogprobs.apply(self, hidden, self.weight, self.bias, targets, temperature)


class ChunkedLogprobs(torch.autograd.Function):
    """The target's logit - log sum exp(logits), a chunk of the vocabulary at a time.

    All logits together, for 4,096 tokens of Qwen3, would take 2.5 GB in fp32, three times over.
    Backward computes them again, and turns each chunk in place into its gradient, one-hot -
    softmax.
    """

    @staticmethod
    def forward(ctx, head, hidden, weight, bias, targets, temperature):
        logsumexp = torch.full(targets.shape, -torch.inf, device=hidden.device)
        target_logits = torch.zeros_like(logsumexp)
        for _, logits, ids, inside in chunks(head, hidden, weight, bias, targets, temperature):
            logit = logits.gather(1, ids)[:, 0]
            nll = F.cross_entropy(logits, ids[:, 0], reduction="none")  # lse - logit, in one kernel
            logsumexp = logsumexp.logaddexp(nll + logit)
            target_logits += torch.where(inside, logit, 0)
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp)
        ctx.head, ctx.temperature = head, temperature
        return target_logits - logsumexp

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, targets, logsumexp = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)  # a sum over the chunks
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        head, temperature = ctx.head, ctx.temperature
        for part, logits, ids, inside in chunks(head, hidden, weight, bias, targets, temperature):
            slope = grad[:, None] * head.scale / temperature
            if head.cap:  # This is the derivative of tanh.
                slope = slope * (1 - (logits * temperature / head.cap) ** 2)
            softmax = logits.sub_(logsumexp[:, None]).exp_()
            softmax.scatter_add_(1, ids, -inside.float()[:, None])
            grad_logits = softmax.mul_(-slope).to(weight.dtype)
            grad_hidden += grad_logits @ weight[part]
            torch.mm(grad_logits.T, hidden, out=grad_weight[part])
            if bias is not None:
                torch.sum(grad_logits, dim=0, out=grad_bias[part])
        return None, grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


def chunks(head, hidden, weight, bias, targets, temperature):
    """Yield a vocabulary slice, logits (N, size), target columns (N, 1), whether in it (N,)."""
    size = max(1, MAX_LOGITS[hidden.device.type] // max(1, len(hidden)))  # ids in a chunk
    for start in range(0, len(weight), size):
        part = slice(start, min(start + size, len(weight)))
        inside = (targets >= start) & (targets < part.stop)
        logits = F.linear(hidden, weight[part], None if bias is None else bias[part]).float()
        if head.cap:
            logits.mul_(head.scale / head.cap).tanh_().mul_(head.cap / temperature)
        elif head.scale != temperature:
            logits *= head.scale / temperature
        yield part, logits, torch.where(inside, targets - start, 0)[:, None], inside


class LogprobModel(torch.nn.Module):
    """A causal language model that returns the log-probabilities of given tokens, not logits.

    Rows have to be padded on the right: no attention mask is built. Dropout is off: what is weighed
    and sampled is the model without it. Raises ValueError if the model has no plain head.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        head, config = model.get_output_embeddings(), model.config
        if model.base_model is model or not isinstance(head, torch.nn.Linear):
            raise ValueError(f"{type(model).__name__} is not supported: it has no plain head")
        # What a model does to its logits has another name in each family.
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        model.set_output_embeddings(LogprobHead(head, scale, cap))
        if getattr(config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa drops the cap.
        for module in model.modules():  # Only checkpointing needs train mode.
            module.training = getattr(module, "gradient_checkpointing", False)
        self.model = model

    @classmethod
    @torch.no_grad()
    def checked(cls, model: torch.nn.Module) -> "LogprobModel":
        """Wrap a model with fp32 weights, and compare it with its own logits on random tokens.

        Raises ValueError if they differ, as for a head that does more than `LogprobHead` knows, or
        if the model sees later tokens, from which it would copy.
        """
        vocabulary = len(model.get_input_embeddings().weight)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (1, CHECK_TOKENS + 1), generator=generator)
        tokens = tokens.to(model.device)
        input_ids, targets = tokens[:, :-1], tokens[:, 1:]
        mask = torch.ones_like(targets, dtype=torch.bool)
        own = own_logprobs(model, tokens)  # (T,)
        wrapped = cls(model)
        logprobs = wrapped(input_ids, targets, mask)[0]
        gap = (logprobs - own).abs().mean().item()
        if not gap < MAX_GAP:
            reason = f"log-probabilities are {gap:.2g} nats a token away from its own logits'"
            raise ValueError(f"{type(model).__name__} is not supported: the trained {reason}")
        other, middle = input_ids.clone(), CHECK_TOKENS // 2
        other[0, middle] = (other[0, middle] + 1) % vocabulary  # Earlier tokens must not see it.
        moved = (wrapped(other, targets, mask)[0] - logprobs)[:middle].abs().max().item()
        if moved > MAX_MOVED:
            reason = f"a token changes log-probabilities before it, by {moved:.2g} nats"
            raise ValueError(f"{type(model).__name__} is not causal: {reason}")
        return wrapped

    def forward(
        self, input_ids: Tensor, targets: Tensor, mask: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """log pi(targets), with logits / temperature: (B, T) fp32, zero where the mask is false.

        `input_ids`, `targets` and `mask` are (B, T). Where it is false, no logits are computed.
        """
        kept = mask.flatten().nonzero()[:, 0]  # (N,), places in the flattened (B * T,)
        # For OLMo, SmolLM3 and others vLLM changes transformers' class: `base(...)` would fail.
        call = torch.nn.Module.__call__
        output = call(self.model.base_model, input_ids=input_ids, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, kept)  # (N, H)
        targets = targets.flatten().index_select(0, kept)
        logprobs = self.model.get_output_embeddings()(hidden, targets, temperature)  # (N,)
        return logprobs.new_zeros(mask.numel()).index_copy(0, kept, logprobs).view(mask.shape)


@torch.no_grad()
def own_logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """log pi of each token but the first, from the model's own logits and plain attention: (T,)."""
    attention = model.config._attn_implementation
    model.eval().set_attn_implementation("eager")
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (1, T, V)
    model.set_attn_implementation(attention)
    return logits[0].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
