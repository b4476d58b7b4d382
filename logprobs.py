"""Log-probabilities of given tokens, without logits in memory. Copy this file: it needs no other.

    model = LogprobModel.checked(AutoModelForCausalLM.from_pretrained(..., dtype="float32"))
    positions = mask.flatten().nonzero()[:, 0]  # where the mask, (B, T), is true
    logprobs = model(input_ids, targets.flatten()[positions], positions)  # (N,)
    logprobs = logprobs.new_zeros(mask.numel()).index_copy(0, positions, logprobs)
    logprobs = logprobs.view(mask.shape)  # (B, T), as `oswft_loss` reads them

The targets follow `input_ids`, both (B, T). Without logits the wrapped model cannot `generate`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # in a chunk: 8 and 256 MiB in fp32
MAX_KEPT = 2**26  # logits of all chunks that may wait for backward: 256 MiB
CHECK_TOKENS = 64  # on which a model is compared with its own logits
MAX_GAP = 1e-3  # nats a token, on average: rounding in fp32 gives 1e-5, a forgotten bias 0.35


class LogprobHead(torch.nn.Module):
    """Takes the place of `lm_head`: hidden states and targets in, log-probabilities out.

    The vocabulary is taken in chunks. A (tokens x vocabulary) tensor never exists: for 4,096 tokens
    of Qwen3 it would take 2.5 GB in fp32, three times over. Where the chunks together are larger
    than `MAX_KEPT`, backward computes their logits again. The head is one module call, as ZeRO-3
    needs it.
    """

    def __init__(self, head: torch.nn.Linear, scale: float = 1.0, cap: float | None = None):
        super().__init__()
        self.weight, self.bias = head.weight, head.bias  # the same Parameters: tied ones stay tied
        self.scale, self.cap = scale, cap

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        """log softmax(logits / temperature)[target]: (N, H), (N,) -> (N,) fp32."""
        size = max(1, MAX_LOGITS[hidden.device.type] // max(1, len(hidden)))  # ids in a chunk
        weights = self.weight.split(size)
        biases = self.bias.split(size) if self.bias is not None else [None] * len(weights)
        hidden = hidden.float()  # so that the chunks' gradients are summed in fp32
        chunk = self.chunk
        if len(hidden) * len(self.weight) > MAX_KEPT:
            chunk = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
        chunks = [
            chunk(hidden, weight, bias, targets - n * size, temperature)
            for n, (weight, bias) in enumerate(zip(weights, biases, strict=True))
        ]
        log_normalizers, target_logits = map(torch.stack, zip(*chunks, strict=True))  # (chunks, N)
        return target_logits.sum(dim=0) - log_normalizers.logsumexp(dim=0)

    def chunk(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log of the sum of exp(logits), and the target's logit, 0 if it is in another chunk."""
        logits = F.linear(hidden.to(weight.dtype), weight, bias).float()  # (N, size)
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap:
            logits = self.cap * (logits / self.cap).tanh()
        if temperature != 1:
            logits = logits / temperature
        inside, index = (targets >= 0) & (targets < len(weight)), targets.clamp(0, len(weight) - 1)
        logit = logits[torch.arange(len(index)), index]  # `gather` would keep the logits
        log_normalizer = F.cross_entropy(logits, index, reduction="none") + logit  # fused
        return log_normalizer, torch.where(inside, logit, 0)


def logit_scale_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """What a model does to its logits after the head's product, under the families' own names."""
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma


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
            model.set_attn_implementation("eager")  # sdpa drops the cap
        for module in model.modules():  # no dropout; checkpointing works in training alone
            module.training = getattr(module, "gradient_checkpointing", False)
        self.model = model

    @classmethod
    @torch.no_grad()
    def checked(cls, model: PreTrainedModel) -> LogprobModel:
        """Wrap a model with fp32 weights, and compare it with its own logits on random tokens.

        Raises ValueError if they differ, as for a head that does more than `LogprobHead` knows.
        """
        vocabulary = len(model.get_input_embeddings().weight)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (1, CHECK_TOKENS + 1), generator=generator)
        tokens, positions = tokens.to(model.device), torch.arange(CHECK_TOKENS, device=model.device)
        own = own_logprobs(model, tokens)  # (T,)
        wrapped = cls(model)
        gap = (wrapped(tokens[:, :-1], tokens[0, 1:], positions) - own).abs().mean().item()
        if not gap < MAX_GAP:
            reason = f"log-probabilities are {gap:.2g} nats a token away from its own logits'"
            raise ValueError(f"{type(model).__name__} is not supported: the trained {reason}")
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
        # For OLMo, SmolLM3 and others vLLM changes transformers' class: `base(...)` would fail.
        base, call = self.model.base_model, torch.nn.Module.__call__
        hidden = call(base, input_ids=input_ids, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, positions)  # (N, H)
        return self.model.get_output_embeddings()(hidden, targets, temperature)


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """log pi of each token but the first, from the model's own logits and plain attention: (T,)."""
    attention = model.config._attn_implementation
    model.eval().set_attn_implementation("eager")
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (1, T, V)
    model.set_attn_implementation(attention)
    return logits[0].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
