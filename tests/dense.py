"""A small model, rows of mixed lengths, and the losses as the equations have them.

In one process, a row at a time, from full logits: no chunks, no micro-batches, no DeepSpeed.
"""

from data import Trajectory, collate

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, ROWS = 97, 11


def make_model(**fields) -> Qwen3ForCausalLM:
    """A small one with random weights."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields = {**sizes, "tie_word_embeddings": True, "initializer_range": 0.2, **fields}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**fields))


def make_rows(generator: torch.Generator, count: int = ROWS) -> list[Trajectory]:
    lengths = torch.randint(2, 20, (count, 2), generator=generator).tolist()
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    return [Trajectory("id", ids(prompt), ids(answer)) for prompt, answer in lengths]


def dense_logprobs(model, row: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """(completion tokens,) from full logits."""
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    logprobs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    start = len(row.prompt_ids) - 1
    return logprobs[start:].gather(-1, ids[0, start + 1 :, None])[:, 0]


def dense_oswft_loss(model, rows, weights, normalizer):
    """Algorithm 1, a row at a time."""
    loss = torch.zeros(())
    for row, weight in zip(rows, weights.tolist(), strict=True):
        loss = loss - weight * dense_logprobs(model, row).sum() / normalizer
    return loss


def dense_grpo_loss(model, rows, advantages, old_logprobs, args, factors=None):
    """DAPO's equation, a token at a time: min(r A, clip(r) A) / all tokens; how many clipped; KL.

    `factors`, if given, are of each row's tokens, like `old_logprobs`.
    """
    total, low, high, kl = torch.zeros(()), 0, 0, 0.0
    factors = factors or [torch.ones_like(old) for old in old_logprobs]
    for row, advantage, old, each in zip(rows, advantages, old_logprobs, factors, strict=True):
        ratios = (dense_logprobs(model, row, args.temperature) - old).exp()
        for ratio, factor in zip(ratios, each, strict=True):
            kl += (ratio - 1 - ratio.log()).item() if advantage else 0
            if advantage > 0:
                total = total + factor * advantage * min(ratio, torch.tensor(args.clip_high))
                high += bool(ratio > args.clip_high)
            if advantage < 0:
                total = total + factor * advantage * max(ratio, torch.tensor(args.clip_low))
                low += bool(ratio < args.clip_low)
    return -total / sum(len(row.response_ids) for row in rows), low, high, kl


def lay_out(values: list[torch.Tensor], rows: list[Trajectory]) -> torch.Tensor:
    """Each row's values of its completion tokens, where `collate` has the targets: (N, T)."""
    mask = collate(rows, range(len(rows))).mask
    return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(values).float())


def assert_same(ours: torch.Tensor, reference: torch.Tensor, largest=5e-5, norm=2e-5) -> None:
    """Equal but for rounding, measured by the whole tensor: a small number may be a sum of large.

    Args:
        largest: how far a number may be off, as a share of the tensor's largest number.
        norm: how far all of them, as a share of the tensor's norm.
    """
    assert ours.shape == reference.shape
    off, reference = ours.double() - reference.double(), reference.double()
    shares = [off.abs().max() / reference.abs().max(), off.norm() / reference.norm()]
    assert (off == 0).all() or (shares[0] <= largest and shares[1] <= norm), shares
