"""Log-probabilities of given tokens, without logits in memory. Copy this file: it needs no other.

    model = LogprobModel.checked(AutoModelForCausalLM.from_pretrained(..., dtype="float32"))
    logprobs = model(input_ids, targets, positions)    # of the targets that follow `positions`

Only torch and transformers are imported. The model's head is one matrix product; log softmax and
its gradient are computed a chunk of the vocabulary at a time.
"""

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Logits that exist at a time, whatever the vocabulary: as many as fit into a CPU's cache, and on a
# GPU enough to keep its matrix units busy (16 and 256 MiB in fp32).
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**26}
CHECK_TOKENS = 64  # on which a model is compared with its own logits
MAX_GAP = 1e-3  # nats a token, on average: rounding in fp32 gives 1e-5, a forgotten bias 0.35


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target], a chunk of the vocabulary at a time.

    The logits are `hidden @ weight.T + bias`, then times `scale`, then soft-capped to +-`cap`: few
    models have more than the matrix. A (tokens x vocabulary) tensor never exists: for 4,096 tokens
    of Qwen3 it would take 2.5 GB in fp32, three times over. Backward computes the logits again:
    four matrix products instead of three. It is one autograd node, so under ZeRO-3 the head is one
    module call.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature=1.0, scale=1.0, cap=None):
        # (N, H), (V, H), (V,) or None, (N,) -> (N,) fp32
        ctx.numbers, ctx.chunks = (temperature, scale, cap), _chunks(hidden, weight)
        target_logits = torch.zeros_like(targets, dtype=torch.float32)
        log_normalizers = torch.full_like(target_logits, -torch.inf)
        for chunk in ctx.chunks:
            logits = _logits(hidden, weight, bias, chunk, *ctx.numbers)  # (N, chunk)
            index, inside = _within(chunk, targets)
            target_logits += torch.where(inside, logits.gather(-1, index)[:, 0], 0)
            log_normalizers = torch.logaddexp(log_normalizers, logits.logsumexp(-1))
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizers)
        return target_logits - log_normalizers

    @staticmethod
    def backward(ctx, grad):  # (N,)
        hidden, weight, bias, targets, log_normalizers = ctx.saved_tensors
        temperature, scale, cap = ctx.numbers
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        grad = grad * (scale / temperature)
        for chunk in ctx.chunks:
            logits = _logits(hidden, weight, bias, chunk, *ctx.numbers)  # (N, chunk)
            # the slope of the soft cap: 1 - tanh^2
            slope = 1 - (logits * (temperature / cap)) ** 2 if cap else None
            # d logprob / d (hidden @ weight.T) = (onehot(target) - softmax(logits)) / temperature
            grad_logits = logits.sub_(log_normalizers[:, None]).exp_().mul_(-grad[:, None])
            index, inside = _within(chunk, targets)
            grad_logits.scatter_add_(-1, index, torch.where(inside, grad, 0)[:, None])
            if cap:
                grad_logits *= slope
            if bias is not None:
                grad_bias[chunk] = grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden += grad_logits @ weight[chunk]
            torch.mm(grad_logits.T, hidden, out=grad_weight[chunk])
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Slices of the vocabulary; each has at most MAX_LOGITS logits, for all tokens together."""
    size = max(1, MAX_LOGITS[hidden.device.type] // max(1, len(hidden)))
    return [slice(start, start + size) for start in range(0, len(weight), size)]


def _logits(hidden, weight, bias, chunk, temperature, scale, cap) -> torch.Tensor:
    """Of a chunk of the vocabulary: (N, chunk) fp32."""
    logits = (hidden @ weight[chunk].T).float()
    if bias is not None:
        logits += bias[chunk]
    if scale != 1:
        logits.mul_(scale)
    if cap:
        logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1 else logits.div_(temperature)


def _within(chunk: slice, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each target: its column (N, 1) in the chunk, and whether it lies in the chunk (N,)."""
    index = targets - chunk.start
    inside = (index >= 0) & (targets < chunk.stop)
    return torch.where(inside, index, 0)[:, None], inside


class LogprobHead(torch.nn.Module):
    """Takes the place of `lm_head`: hidden states and targets in, log-probabilities out."""

    def __init__(self, head: torch.nn.Linear, scale: float = 1.0, cap: float | None = None):
        super().__init__()
        self.weight, self.bias = head.weight, head.bias  # the same Parameters: tied ones stay tied
        self.scale, self.cap = scale, cap

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        return ChunkedLogprobs.apply(
            hidden, self.weight, self.bias, targets, temperature, self.scale, self.cap
        )


def logit_scale_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """What a model does to its logits after the head's product, under the families' own names."""
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma


# In every pass, transformers' own "sdpa" asks the GPU whether the positions need a mask, and the
# host waits for the answer. Under another name it builds no mask, and causal attention needs none.
CAUSAL_ATTENTION = "causal_sdpa"
AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)


class LogprobModel(torch.nn.Module):
    """A causal language model that returns the log-probabilities of given tokens, not logits.

    Rows have to be padded on the right: no attention mask is built. Dropout is off: what is weighed
    and sampled is the model without it. Raises ValueError if the model has no plain head.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        head, config = model.get_output_embeddings(), model.config
        if model.base_model is model or not isinstance(head, torch.nn.Linear):
            raise ValueError(f"{type(model).__name__} is not supported: it has no plain head")
        model.set_output_embeddings(LogprobHead(head, *logit_scale_and_cap(config)))
        if getattr(config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # the others drop the cap
        elif config._attn_implementation == "sdpa" and not has_windows(config):
            model.set_attn_implementation(CAUSAL_ATTENTION)
        for module in model.modules():  # no dropout; checkpointing works in training alone
            module.training = getattr(module, "gradient_checkpointing", False)
        self.model = model

    @classmethod
    @torch.no_grad()
    def checked(cls, model: PreTrainedModel) -> "LogprobModel":
        """Wrap a model with fp32 weights, and compare it with its own logits on random tokens.

        Raises ValueError if they differ, as for a head that does more than `LogprobHead` knows.
        """
        vocabulary = len(model.get_input_embeddings().weight)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (1, CHECK_TOKENS + 1), generator=generator)
        tokens, positions = tokens.to(model.device), torch.arange(CHECK_TOKENS, device=model.device)
        own = own_logprobs(model, tokens)  # (T,)
        wrapped = cls(model)
        logprobs = wrapped(tokens[:, :-1], tokens[0, 1:], positions)  # (T,)
        gap = (logprobs - own).abs().mean().item()
        if not gap < MAX_GAP:
            raise ValueError(
                f"{type(model).__name__} is not supported: its log-probabilities, as they would be "
                f"trained, are {gap:.2g} nats a token away from those of its own logits"
            )
        return wrapped

    def forward(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """log pi(target) at each position: (N,) fp32.

        Args:
            input_ids: (B, T) the tokens that are read.
            targets: (N,) the token that follows each position.
            positions: (N,) indices into the flattened (B * T,).
            temperature: the logits are divided by it.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return head(hidden.flatten(0, 1).index_select(0, positions), targets, temperature)


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """log pi of each token but the first, from the model's own logits and plain attention: (T,)."""
    attention = model.config._attn_implementation
    model.eval().set_attn_implementation("eager")
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (1, T, V)
    model.set_attn_implementation(attention)
    return logits[0].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def has_windows(config: PreTrainedConfig) -> bool:
    """Whether some layer's attention does not reach back to the first token."""
    layers = set(getattr(config, "layer_types", None) or [])
    return getattr(config, "sliding_window", None) is not None or bool(layers - {"full_attention"})
