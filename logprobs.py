"""Log-probabilities of given tokens, without logits in memory. Copy this file: it needs no other.

    model = LogprobModel(AutoModelForCausalLM.from_pretrained(...))
    logprobs = model(input_ids, targets, positions)    # of the targets that follow `positions`

Only torch and transformers are imported. The model's head is one matrix product; log softmax and
its gradient are computed a chunk of the vocabulary at a time.
"""

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Logits that exist at a time, whatever the vocabulary: as many as fit into a CPU's cache, and on a
# GPU enough to keep its matrix units busy (16 and 256 MiB in fp32).
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**26}


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], a chunk of the vocabulary at a time.

    A (tokens x vocabulary) tensor never exists: for 4,096 tokens of Qwen3 it would take 2.5 GB in
    fp32, three times over. Backward computes the logits again: four matrix products instead of
    three. It is one autograd node, so under ZeRO-3 the head is one module call.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):  # (N, H), (V, H), (N,) -> (N,) fp32
        ctx.temperature, ctx.chunks = temperature, _chunks(hidden, weight)
        target_logits = torch.zeros_like(targets, dtype=torch.float32)
        log_normalizers = torch.full_like(target_logits, -torch.inf)
        for chunk in ctx.chunks:
            logits = _logits(hidden, weight[chunk], temperature)  # (N, chunk)
            index, inside = _within(chunk, targets)
            target_logits += torch.where(inside, logits.gather(-1, index)[:, 0], 0)
            log_normalizers = torch.logaddexp(log_normalizers, logits.logsumexp(-1))
        ctx.save_for_backward(hidden, weight, targets, log_normalizers)
        return target_logits - log_normalizers

    @staticmethod
    def backward(ctx, grad):  # (N,)
        hidden, weight, targets, log_normalizers = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        grad = grad / ctx.temperature
        for chunk in ctx.chunks:
            logits = _logits(hidden, weight[chunk], ctx.temperature)  # (N, chunk)
            # d logprob / d (hidden @ weight.T) = (onehot(target) - softmax(logits)) / temperature
            grad_logits = logits.sub_(log_normalizers[:, None]).exp_().mul_(-grad[:, None])
            index, inside = _within(chunk, targets)
            grad_logits.scatter_add_(-1, index, torch.where(inside, grad, 0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden += grad_logits @ weight[chunk]
            torch.mm(grad_logits.T, hidden, out=grad_weight[chunk])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Slices of the vocabulary; each has at most MAX_LOGITS logits, for all tokens together."""
    size = max(1, MAX_LOGITS[hidden.device.type] // max(1, len(hidden)))
    return [slice(start, start + size) for start in range(0, len(weight), size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _within(chunk: slice, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each target: its column (N, 1) in the chunk, and whether it lies in the chunk (N,)."""
    index = targets - chunk.start
    inside = (index >= 0) & (targets < chunk.stop)
    return torch.where(inside, index, 0)[:, None], inside


class LogprobHead(torch.nn.Module):
    """Takes the place of `lm_head`: hidden states and targets in, log-probabilities out."""

    def __init__(self, weight: torch.nn.Parameter):
        super().__init__()
        self.weight = weight  # the same Parameter, so tied embeddings stay tied

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        return ChunkedLogprobs.apply(hidden, self.weight, targets, temperature)


# In every pass, transformers' own "sdpa" asks the GPU whether the positions need a mask, and the
# host waits for the answer. Under another name it builds no mask, and causal attention needs none.
CAUSAL_ATTENTION = "causal_sdpa"
AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)


class LogprobModel(torch.nn.Module):
    """A causal language model that returns the log-probabilities of given tokens, not logits.

    Rows have to be padded on the right: no attention mask is built.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        model.set_output_embeddings(LogprobHead(model.get_output_embeddings().weight))
        if getattr(model.config, "sliding_window", None) is None:
            model.set_attn_implementation(CAUSAL_ATTENTION)
        self.model = model

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
