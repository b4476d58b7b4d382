"""Group Relative Policy Optimization: the model learns from its own answers, not from an expert's.

The reinforcement-learning baseline of the paper. G answers to each question q are sampled and
checked; an answer is reinforced by how much better it is than its group, token by token:

    A = (r - mean of the group) / std of the group
    ratio = pi(token) / pi_old(token)
    loss = - sum over the batch's tokens of  min(ratio * A, clip(ratio, 0.8, 1.28) * A)  /  tokens

As in the paper, the loss is token-level (DAPO), the clipping is asymmetric, and there is neither a
KL term nor a reference model. What the paper leaves open: the loss is divided by all tokens of the
global batch; std is that of a sample (divided by G - 1); pi_old is computed by the trainer, not by
vLLM, before the batch's first update, at the sampling temperature; groups that are all right or all
wrong have A = 0: they are not computed, but their tokens count in the divisor.

    deepspeed --quiet train_grpo.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    deepspeed --quiet train_grpo.py --resume runs/grpo    # more ways to start: train_oswft.py
    python -m paper.select_checkpoint runs/grpo           # which checkpoint to evaluate
"""

from dataclasses import dataclass

from data import InputError, Queries, Rows, count_rows
from engine import Engine, EngineArgs, init_training, load_engine
from launch import check_solutions, claim_or_resume, load_training_data, run_script
from rollout import Groups, Rollout, RolloutArgs, completion_stats, judge, trajectories
from run import Run, RunArgs
from verify import Verifier

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(kw_only=True)
class Args(RolloutArgs, EngineArgs, RunArgs):
    """This method's flags; each base's file has the others."""

    output_dir: str = "runs/grpo"  # where the run writes; all hosts share it
    save_every: int = 10  # optimizer steps between checkpoints
    keep_models: bool = True  # any of them may be the one that is evaluated

    # The method
    num_rollouts: int = 8  # G, answers sampled per query
    clip_low: float = 0.8  # lower bound of the ratio itself, not its distance from 1
    clip_high: float = 1.28  # upper bound of the ratio itself

    # Optimization
    learning_rate: float = 1e-6  # learning rate of AdamW, constant
    train_batch_size: int | None = None  # queries per optimizer step; None: the rollout batch

    def check(self) -> None:
        super().check()
        if self.num_rollouts < 2:
            raise InputError("--num_rollouts must be at least 2: an answer is compared with others")
        if not 0.5 <= self.clip_low <= 1 <= self.clip_high:  # Elsewhere 0.2 is an epsilon.
            raise InputError("--clip_low is 0.5 to 1, --clip_high 1 or more: they bound the ratio")


# ---- The method ----------------------------------------------------------------------------------


def grpo_advantages(rewards: Tensor) -> Tensor:
    """A = (r - mean) / std of the G answers to a query, 0 where all are alike: (B, G) -> (B, G).

    >>> grpo_advantages(torch.tensor([[1., 0., 0.], [1., 1., 1.]]))  # answers to 7+5*3 and 1+2
    tensor([[ 1.1547, -0.5773, -0.5773],
            [ 0.0000,  0.0000,  0.0000]])
    """
    rewards = rewards.detach().float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # (B, G)
    # Compare the rewards themselves: r - mean may not round to 0.
    alike = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # (B, 1)
    return (centred / (rewards.std(dim=1, keepdim=True) + 1e-6)).masked_fill(alike, 0)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    normalizer: float,
    clip_low: float = 0.8,
    clip_high: float = 1.28,
) -> Tensor:
    """-(sum of min(ratio * A, clip(ratio) * A)) / normalizer: a micro-batch's share (DAPO).

    Args:
        logprobs: (N, T) log pi of each token of the sampled answers.
        old_logprobs: (N, T) the same before the batch's first update; constants.
        advantages: (N,) from `grpo_advantages`.
        mask: (N, T), true on the answers' tokens, false on prompt and padding.
        normalizer: completion tokens in the *global* batch, those of skipped answers included.
        clip_low, clip_high: bounds of the ratio. A token that its advantage has pushed past one of
            them has no gradient.
    """
    ratio = torch.where(mask.bool(), logprobs - old_logprobs, 0).exp()  # (N, T)
    clipped = ratio.clamp(clip_low, clip_high)
    objective = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(objective * mask).sum() / normalizer


def update(
    engine: Engine, rows: Rows, advantages: Tensor, old: Tensor | None, args: Args
) -> dict[str, float]:
    """One optimizer step on B * G rows; advantages (B, G), log pi_old (B * G, T) or None."""
    num_tokens = sum(len(row.response_ids) for row in rows)
    no_signal = (advantages == 0).all(dim=1).float().mean().item()
    advantages = advantages.flatten().to(engine.device)  # (N,)
    sums = torch.zeros(4, device=engine.device)
    for batch in engine.micro_batches(rows, keep=advantages != 0):  # this rank's share
        logprobs = engine.logprobs(batch, args.temperature)  # (n, T)
        fixed = logprobs.detach()
        old_logprobs = fixed if old is None else old[batch.indices, : logprobs.shape[1]]  # (n, T)
        advantage = advantages[batch.indices]  # (n,)
        clip = (args.clip_low, args.clip_high)
        loss = grpo_loss(logprobs, old_logprobs, advantage, batch.mask, num_tokens, *clip)
        engine.backward(loss, batch.is_last)  # gradients add up over micro-batches and ranks
        sums += diagnose(fixed, old_logprobs, advantage, batch.mask, args)
    stats = engine.step(args.learning_rate)

    dist.all_reduce(sums)
    tokens, low, high, kl = sums.tolist()
    tokens = max(tokens, 1)  # There may be none.
    means = {"clipped_low_share": low / tokens, "clipped_high_share": high / tokens}
    counts = count_rows(rows, keep=advantages != 0)
    return {"no_signal_share": no_signal, **stats, **counts, **means, "approx_kl": kl / tokens}


def log_pi_old(
    engine: Engine, queries: Queries, completions: Groups, advantages: Tensor, args: Args
) -> Tensor | None:
    """log pi_old of the answers, (B, G, T), before the batch's first update. A collective."""
    if args.train_batch_size in (None, args.rollout_batch_size):
        return None  # With one update pi_old is the model itself.
    rows = trajectories(queries, completions)
    old = engine.eval_logprobs(rows, args.temperature, keep=advantages.flatten() != 0)
    return old.view(*advantages.shape, -1)


def diagnose(logprobs, old_logprobs, advantages, mask, args: Args) -> Tensor:
    """(4,) sums over a micro-batch's tokens: of 1, of those clipped low, clipped high, of KL."""
    log_ratio = logprobs - old_logprobs  # (n, T); advantages (n,)
    ratio = log_ratio.exp()
    clipped_low = (ratio < args.clip_low) & (advantages[:, None] < 0) & mask
    clipped_high = (ratio > args.clip_high) & (advantages[:, None] > 0) & mask
    kl = (ratio - 1 - log_ratio) * mask  # It is unbiased, and never negative.
    return torch.stack([mask.sum(), clipped_low.sum(), clipped_high.sum(), kl.sum()])


# ---- The loop ------------------------------------------------------------------------------------


def main(args: Args) -> int:
    """Train; returns the exit status."""
    init_training()
    checkpoint = claim_or_resume(args)
    tokenizer, examples = load_training_data(args, solution="")  # It learns from none.
    verifier = Verifier(args.verifier_workers, reward=args.reward)  # It starts while models load.
    engine = load_engine(args.model, args, checkpoint)
    rollout = Rollout(args.model, tokenizer, args)
    if not checkpoint:
        check_solutions(verifier, examples)

    with verifier, Run(args, engine, tokenizer, examples, rollout) as run:
        for number, queries in run.batches():  # the same on every rank
            # ---- sync: vLLM gets the current parameters
            rollout.load_parameters(engine.named_parameters())
            run.lap("sync_s")
            # ---- sample: G answers to each query
            completions = rollout.sample(queries, number, stop=run.stop_requested)  # (B, G)
            if run.should_stop():  # Answers may be missing; `run` saves a checkpoint.
                break
            gap = engine.check_vllm(queries, completions, args.temperature, strict=run.at_start)
            run.lap("rollout_s")

            # ---- judge: which are right?
            rewards = judge(verifier, queries, completions)  # (B, G)

            # ---- weigh: how much better than its group is an answer?
            advantages = grpo_advantages(rewards)  # (B, G)
            run.save_rollouts(queries, completions, rewards, advantage=advantages)
            run.lap("verify_s")

            # ---- update: one optimizer step per `train_batch_size` queries
            old = log_pi_old(engine, queries, completions, advantages, args)  # (B, G, T), or None
            for part in run.parts(queries):
                old_part = None if old is None else old[part].flatten(0, 1)  # (b * G, T)
                rows = trajectories(queries, completions[part])  # b * G of them
                stats = update(engine, rows, advantages[part], old_part, args)
                sampled = completion_stats(completions[part])
                run.end_step({"reward": rewards[part].mean().item(), **stats, **gap, **sampled})
    return run.status


if __name__ == "__main__":
    run_script(main, Args, __doc__)
