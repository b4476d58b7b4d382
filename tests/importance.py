"""Run by test_patches.py through the launcher: importance.diff's gradient beside a dense one."""

import train_grpo
from data import pad_completions
from engine import finish, init_distributed
from gradients import SETTINGS, dense_logprobs, make_engine, make_rows, same_step

import torch
import torch.distributed as dist

TEMPERATURE, CAP = 0.7, 1.5


def dense_loss(model, rows, advantages, old_logprobs, vllm_logprobs):
    """A row at a time: mean of min(pi_old / vLLM's pi, cap) * min(r A, clip(r) A)."""
    total = torch.zeros(())
    for row, advantage, old, vllm in zip(
        rows, advantages, old_logprobs, vllm_logprobs, strict=True
    ):
        ratio = (dense_logprobs(model, row, TEMPERATURE) - old).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total = total + ((old - vllm).exp().clamp(max=CAP) * objective).sum()
    return -total / sum(len(row.completion_ids) for row in rows)


if __name__ == "__main__":
    init_distributed()
    args = train_grpo.Args(**SETTINGS, temperature=TEMPERATURE, importance_cap=CAP)
    engine, reference, adam, gradients = make_engine(args)
    generator = torch.Generator().manual_seed(0)
    rows = make_rows(generator)
    advantages = torch.randn(len(rows), generator=generator)
    advantages[3] = 0
    with torch.no_grad():
        old = [dense_logprobs(reference, row, TEMPERATURE) for row in rows]
    vllm = [x + 0.8 * torch.randn(len(x), generator=generator) for x in old]
    padded = pad_completions([x.tolist() for x in vllm], rows).to(engine.device)
    scores = engine.eval_logprobs(rows, TEMPERATURE, advantages != 0)
    for old_logprobs in (None, scores[:, None]):  # the first update of a batch, then a later one
        loss = dense_loss(reference, rows, advantages, old, vllm)
        alone = advantages[:, None]  # groups of one answer
        stats = train_grpo.update(engine, rows, alone, old_logprobs, padded, args)
        same_step(engine, reference, adam, gradients, loss, stats, args)
    assert stats["clipped_low_share"] + stats["clipped_high_share"] > 0
    if dist.get_rank() == 0:
        print("equal")
    finish(0)
