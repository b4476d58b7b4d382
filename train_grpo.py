"""Group Relative Policy Optimization: the model learns from its own answers, not from an expert's.

The reinforcement-learning baseline of the paper. G answers to each question q are sampled and
checked; an answer is reinforced by how much better it is than its group, token by token:

    A = (r - mean of the group) / std of the group
    ratio = pi(token) / pi_old(token)
    loss = - sum over the batch's tokens of  min(ratio * A, clip(ratio, 0.8, 1.28) * A)  /  tokens

As in the paper, the loss is a mean over all tokens of the global batch (DAPO), the clipping is
asymmetric, and there is neither a KL term nor a reference model. What the paper leaves open: std is
that of a sample (divided by G - 1); pi_old is the training model's own, before the batch's first
update, at the sampling temperature; groups that are all right or all wrong have A = 0, cost no
forward or backward pass, and their tokens still count in the divisor.

    deepspeed train_grpo.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    python train_grpo.py ...                                  # one process, no launcher
    deepspeed --hostfile hosts train_grpo.py ...              # several hosts, a shared output_dir
    deepspeed train_grpo.py ... --resume                      # go on from the newest checkpoint
    python -m paper.select_checkpoint runs/grpo               # which checkpoint to evaluate
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data import InputError, Trajectory, derive_seed, pad_completions
from engine import Engine, gather, gather_rewards, init_distributed
from rollout import CHECKED_QUERIES, Rollout, completion_stats, trajectories, vllm_gap
from run import RolloutArgs, Run, claim_output_dir, load_training_data, run_script
from verify import RewardError, Verifier


@dataclass(kw_only=True)
class Args(RolloutArgs):
    output_dir: str = "runs/grpo"  # where the run writes; all hosts share it
    save_every: int = 10  # optimizer steps between checkpoints; every checkpoint's model is kept

    # The method
    num_rollouts: int = 8  # G, answers sampled per query
    temperature: float = 1.0  # of sampling
    clip_low: float = 0.8  # the ratio's lower bound
    clip_high: float = 1.28  # the ratio's upper bound
    importance_correction: bool = False  # weigh tokens by min(pi_old / vLLM's pi, importance_cap)
    importance_cap: float = 2.0  # of the importance correction

    # Optimization
    learning_rate: float = 1e-6  # of AdamW, constant
    rollout_batch_size: int = 128  # queries that are answered together
    train_batch_size: int | None = None  # queries per optimizer step; default: all of them

    # Lengths, in tokens
    max_length: int = 5120  # of prompt and solution together; a longer row is dropped
    max_completion_length: int = 4096  # of a rollout; a prompt that leaves less room is dropped

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.num_rollouts < 2:
            raise InputError("--num_rollouts must be at least 2: an answer is compared with others")
        if not self.clip_low <= 1 <= self.clip_high:
            raise InputError("--clip_low and --clip_high must hold 1 between them")


# ------------------------------------------------------------------------------------------------
# The method


def grpo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """A = (r - mean) / std of the answers to the same query; 0 where all of them are alike.

    Args:
        rewards: (B, G), 1 for a right answer, 0 for a wrong one; G is at least 2.

    Returns:
        (B, G) advantages.

    >>> grpo_advantages(torch.tensor([[1., 0., 0.], [1., 1., 1.]]))
    tensor([[ 1.1547, -0.5774, -0.5774],
            [ 0.0000,  0.0000,  0.0000]])
    """
    rewards = rewards.detach().float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # (B, G)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    normalizer: float,
    clip_low: float = 0.8,
    clip_high: float = 1.28,
) -> torch.Tensor:
    """- sum over tokens of min(ratio * A, clip(ratio) * A) / normalizer (section 4.1; DAPO).

    Args:
        logprobs: (N, T) log pi of each token of the sampled answers.
        old_logprobs: (N, T) the same before the batch's first update; constants.
        advantages: (N,) from `grpo_advantages`.
        mask: (N, T), 1 on the answers' tokens, 0 on prompt and padding; what lies between, or
            above 1, weighs a token.
        normalizer: completion tokens in the *global* batch, those of skipped answers included.
        clip_low, clip_high: bounds of the ratio, beyond which a token that has already moved the
            way its advantage pushes is not pushed on.

    Returns:
        a scalar; summed over any split of the batch, it is the loss of the whole batch.
    """
    ratio = torch.where(mask > 0, logprobs - old_logprobs, 0).exp()  # (N, T)
    clipped = ratio.clamp(clip_low, clip_high)
    objective = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(objective * mask).sum() / normalizer


def update(
    engine: Engine,
    answers: Sequence[Trajectory],
    advantages: torch.Tensor,
    sampling_logprobs: torch.Tensor | None,
    old_logprobs: torch.Tensor | None,
    args: Args,
) -> dict[str, float]:
    """One optimizer step on sampled answers; returns its metrics.

    Args:
        advantages: (N,) of the answers.
        sampling_logprobs: (N, T) vLLM's, laid out by `pad_completions`, for the correction.
        old_logprobs: (N, T) from `engine.score`; None if this model is the one that sampled.
    """
    normalizer = sum(len(answer.completion_ids) for answer in answers)
    advantages = advantages.to(engine.device)
    diagnostics = []

    # Advantage 0 means no gradient: these rows cost no pass, but the normalizer counts them.
    for batch in engine.passes(answers, args.max_tokens_per_micro_batch, keep=advantages != 0):
        logprobs = engine.logprobs(batch, args.temperature)  # (n, T)
        if old_logprobs is None:
            old = logprobs.detach()
        else:
            old = old_logprobs[batch.rows, : logprobs.shape[1]]  # (n, T)
        mask, advantage = batch.mask.float(), advantages[batch.rows]  # (n, T), (n,)
        if args.importance_correction:
            sampling = sampling_logprobs[batch.rows, : logprobs.shape[1]]  # (n, T)
            mask *= (old - sampling).exp().clamp(max=args.importance_cap)
        loss = grpo_loss(logprobs, old, advantage, mask, normalizer, args.clip_low, args.clip_high)
        engine.backward(loss)
        diagnostics.append(diagnose(logprobs.detach(), old, advantage, batch.mask, args))
    stats = engine.step()

    skipped = (advantages == 0).tolist()
    learnt = [answer for answer, skip in zip(answers, skipped, strict=True) if not skip]
    return {
        **stats,
        **mean_diagnostics(diagnostics),
        "skipped_sequences": sum(skipped),
        "train_tokens": sum(map(len, learnt)),
    }


def diagnose(logprobs, old_logprobs, advantages, mask, args) -> dict:
    """Sums over the tokens of one pass; scalars by name."""
    log_ratio = logprobs - old_logprobs  # (n, T), like all of these
    ratio = log_ratio.exp()
    return {
        "tokens": mask.sum(),
        "clipped_low": ((ratio < args.clip_low) & (advantages[:, None] < 0) & mask).sum(),
        "clipped_high": ((ratio > args.clip_high) & (advantages[:, None] > 0) & mask).sum(),
        "kl": ((ratio - 1 - log_ratio) * mask).sum(),  # unbiased, and never negative
    }


def mean_diagnostics(diagnostics: Sequence[dict]) -> dict[str, float]:
    """Means over the tokens of all passes on all ranks. A collective."""
    passes = gather([{name: value.item() for name, value in sums.items()} for sums in diagnostics])
    total = {name: sum(sums[name] for sums in passes) for name in passes[0]}
    tokens = max(total["tokens"], 1)  # 0 where no group has a signal
    return {
        "clipped_low_share": total["clipped_low"] / tokens,
        "clipped_high_share": total["clipped_high"] / tokens,
        "approx_kl": total["kl"] / tokens,
    }


# ------------------------------------------------------------------------------------------------
# The loop


def main(args: Args) -> int:
    """Train; returns the exit status."""
    args.check(world_size=init_distributed())
    checkpoint = claim_output_dir(args)
    tokenizer, examples = load_training_data(args, args.rollout_batch_size)
    verifier = Verifier(args.verifier_workers, reward=args.reward)  # starts while models load
    engine = Engine.from_args(args, checkpoint)
    rollout = Rollout.from_args(args, tokenizer)
    batch_size, size, k = args.rollout_batch_size, args.train_batch_size, args.num_rollouts
    steps_per_batch = batch_size // size  # S of Theorem 2

    run = Run(args, engine, tokenizer, examples, batch_size, steps_per_batch, checkpoint, rollout)
    run.keep_models = True  # any of them may be the one that is evaluated
    with run, verifier:
        for batch, queries in run.batches():  # the same on every rank
            # ---- rollout: G answers to each query, from the current weights
            rollout.load_weights(engine.named_weights())
            run.lap("sync_s")
            completions = rollout.generate(
                [query.prompt_ids for query in queries],
                num_samples=k,
                max_tokens=args.max_completion_length,
                seeds=[derive_seed(args.seed, batch, query.id) for query in queries],
                temperature=args.temperature,
                logprobs=batch_size if args.importance_correction else CHECKED_QUERIES,
                on_progress=run.on_rollout,
            )  # this rank's share
            rollout.sleep()
            if run.should_stop():  # nothing was learnt since the last step
                break
            run.lap("rollout_s")

            # ---- verify: which answers are right?
            answered = [queries[completion.query].example for completion in completions]
            verdicts = verifier.score(
                [completion.text for completion in completions],
                [example.columns if args.reward else example.answer for example in answered],
            )
            completions, rewards = gather_rewards(completions, verdicts, len(queries))  # (B, G)
            gap = vllm_gap(engine, queries, completions, args, refuse=run.step == run.first_step)

            # ---- weigh: how much better than its group is an answer?
            advantages = grpo_advantages(rewards)  # (B, G)
            run.save_rollouts(queries, completions, rewards, advantage=advantages)
            run.lap("verify_s")

            # ---- update: one optimizer step per `train_batch_size` queries
            answers = trajectories(queries, completions)
            rewards, advantages = rewards.flatten(), advantages.flatten()  # (B * G,)
            sampling = old = None  # (B * G, T), where they are needed
            if args.importance_correction:
                sampling = pad_completions([c.logprobs for c in completions], answers)
                sampling = sampling.to(engine.device)
            if steps_per_batch > 1:  # the model moves on before the batch is used up
                budget, keep = args.max_tokens_per_micro_batch, advantages != 0
                old = engine.score(answers, budget, args.temperature, keep)  # (B * G, T)
            for start in range(0, len(answers), size * k):
                part = slice(start, start + size * k)
                given = [None if values is None else values[part] for values in (sampling, old)]
                stats = update(engine, answers[part], advantages[part], *given, args)
                run.lap("train_s")
                no_signal = (advantages[part].view(size, k) == 0).all(dim=1)
                run.log(
                    {
                        "reward": rewards[part].mean().item(),
                        "no_signal_share": no_signal.float().mean().item(),
                        **stats,
                        **gap,
                        **completion_stats(completions[part]),
                    }
                )
    return 0 if run.finished else 130


if __name__ == "__main__":
    run_script(main, Args, __doc__, (RewardError,))
