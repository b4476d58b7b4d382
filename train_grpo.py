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
    deepspeed --num_gpus 1 train_grpo.py ...                  # one GPU of several
    deepspeed --hostfile hosts train_grpo.py ...              # several hosts, a shared output_dir
    deepspeed train_grpo.py ... --resume                      # go on from the newest checkpoint
    python train_grpo.py --select_checkpoint runs/grpo        # which checkpoint to evaluate
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from data import InputError, TokenizedExample, batch_indices, derive_seed, read_rows
from engine import (
    Engine,
    RolloutArgs,
    Run,
    check_answers,
    exit_with,
    gather,
    init_distributed,
    load_training_data,
    parse_args,
)
from rollout import Completion, Rollout, completion_stats
from verify import Verifier


@dataclass
class Args(RolloutArgs):
    output_dir: str = "runs/grpo"  # for all that the run leaves; all hosts share it
    learning_rate: float = 1e-6  # constant
    save_every: int = 10  # optimizer steps between checkpoints; every checkpoint's model is kept

    # The method
    num_rollouts: int = 8  # G, answers sampled per query
    clip_low: float = 0.8  # the ratio's lower bound
    clip_high: float = 1.28  # the ratio's upper bound
    importance_correction: bool = False  # weigh tokens by min(pi_old / vLLM's pi, importance_cap)
    importance_cap: float = 2.0  # of the importance correction

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.num_rollouts < 2:
            raise InputError("--num_rollouts must be at least 2: an answer is compared with others")
        if not 0 < self.clip_low <= 1 <= self.clip_high:
            raise InputError("--clip_low and --clip_high must hold 1 between them, above 0")
        if not self.importance_cap > 0:
            raise InputError(f"--importance_cap must be above 0, got {self.importance_cap}")


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


# ------------------------------------------------------------------------------------------------
# The loop


def train(args: Args) -> None:
    args.check(world_size=init_distributed())
    run = Run(args, keep_models=True)  # for --select_checkpoint
    tokenizer, examples = load_training_data(args)
    engine = Engine.from_args(args)
    rollout = Rollout(
        args.model,
        tokenizer,
        max_length=args.max_length,
        precision=args.precision,
        memory_share=args.vllm_memory,
        tensor_parallel=args.vllm_tensor_parallel,
        sleep=args.vllm_sleep,
    )
    max_steps = args.num_steps(len(examples))
    step = run.start(engine, max_steps)

    with Verifier(args.verifier_workers) as verifier:
        while step < max_steps:
            batch = step // args.steps_per_batch
            order = batch_indices(len(examples), args.batch_size, batch, args.seed)
            queries = [examples[i] for i in order]  # the same on every rank

            # ---- rollout: G answers to each query, from the current weights
            rollout.load_weights(engine.named_weights())
            run.lap("sync_s")
            completions = rollout.generate(
                [query.prompt_ids for query in queries],
                num_samples=args.num_rollouts,
                max_tokens=args.max_completion_length,
                seeds=[derive_seed(args.seed, batch, query.example.id) for query in queries],
                temperature=args.temperature,
                logprobs=True,
                on_progress=run.on_rollout,
            )  # this rank's share
            rollout.sleep()
            if run.should_stop():  # nothing was learnt since the last step
                break
            run.lap("rollout_s")

            # ---- verify: which answers are right?
            answers, rewards = check_answers(verifier, completions, queries)  # rewards (B, G)

            # ---- weigh: how much better than its group is an answer?
            advantages = grpo_advantages(rewards)  # (B, G)
            run.save_rollouts(
                step + 1, queries, answers, pass_rate=rewards.mean(1), advantage=advantages
            )
            run.lap("verify_s")
            samples = [
                Sample.of(queries[answer.query], answer, advantage)
                for (answer, _), advantage in zip(answers, advantages.flatten(), strict=True)
            ]

            # ---- update: one optimizer step per `train_batch_size` queries
            if args.steps_per_batch > 1:
                keep_old_logprobs(engine, samples, args)
            size = len(queries) // args.steps_per_batch
            for start in range(0, len(queries), size):
                piece = slice(start, start + size)
                in_piece = slice(start * args.num_rollouts, (start + size) * args.num_rollouts)
                stats = update(engine, samples[in_piece], args)
                step += 1
                run.lap("train_s")
                run.log(
                    {
                        "step": step,
                        "epoch": step * size / len(examples),
                        "reward": rewards[piece].mean().item(),
                        "no_signal_share": (advantages[piece] == 0).all(1).float().mean().item(),
                        **stats,
                        **completion_stats([answer for answer, _ in answers[in_piece]]),
                    }
                )
            if step % args.save_every < args.steps_per_batch:
                run.save_checkpoint(engine, tokenizer, step)
            if run.should_stop():
                break
    run.finish(engine, tokenizer, step)


@dataclass
class Sample:
    """A sampled answer, as the update needs it."""

    row: TokenizedExample  # prompt and answer
    advantage: float
    sampling_logprobs: torch.Tensor  # (completion tokens,) vLLM's
    old_logprobs: torch.Tensor | None = None  # the training model's, if it will move on meanwhile

    @classmethod
    def of(cls, query: TokenizedExample, answer: Completion, advantage: float) -> "Sample":
        row = TokenizedExample(query.example, query.prompt_ids, answer.token_ids)
        return cls(row, float(advantage), torch.tensor(answer.logprobs))


def keep_old_logprobs(engine: Engine, samples: list[Sample], args: Args) -> None:
    """Score the samples that have a gradient, before the batch's first update."""
    live = [sample for sample in samples if sample.advantage]
    rows = [sample.row for sample in live]
    scores = engine.score(rows, args.max_tokens_per_micro_batch, args.temperature)
    for sample, logprobs in zip(live, scores, strict=True):
        sample.old_logprobs = logprobs


def update(engine: Engine, samples: list[Sample], args: Args) -> dict[str, float]:
    """One optimizer step on sampled answers; returns its metrics."""
    normalizer = sum(len(sample.row.completion_ids) for sample in samples)
    # Advantage 0 means no gradient, so these rows are left out; the normalizer still counts them.
    live = [sample for sample in samples if sample.advantage]
    diagnostics = [torch.zeros(6, device=engine.device)]

    def loss_fn(logprobs, mask, i):  # (N, T), (N, T), N of the live samples
        now = [live[n] for n in i]

        def spread(values):  # one tensor (completion tokens,) for each row -> (N, T)
            flat = torch.cat(values).to(logprobs.device, non_blocking=True)
            return torch.zeros_like(logprobs).masked_scatter(mask, flat)

        sampling = spread([sample.sampling_logprobs for sample in now])
        old = logprobs.detach()  # the model is still the one that sampled, unless it was kept
        if now[0].old_logprobs is not None:
            old = spread([sample.old_logprobs for sample in now])
        advantages = torch.tensor([sample.advantage for sample in now])
        advantages = advantages.to(logprobs.device, non_blocking=True)
        weights = mask.float()
        if args.importance_correction:
            weights = weights * (old - sampling).exp().clamp(max=args.importance_cap)
        diagnostics.append(diagnose(logprobs.detach(), old, sampling, advantages, mask, args))
        return grpo_loss(
            logprobs, old, advantages, weights, normalizer, args.clip_low, args.clip_high
        )

    stats = engine.update(
        [sample.row for sample in live],
        loss_fn,
        args.max_tokens_per_micro_batch,
        args.temperature,
    )
    passes = torch.tensor(gather(torch.stack(diagnostics).tolist()))  # (passes of all ranks, 6)
    tokens, low, high, kl, gap = (passes[:, :5].sum(0)).tolist()
    tokens = max(tokens, 1)  # none, where no group has a signal
    return {
        **stats,
        "clipped_low_share": low / tokens,
        "clipped_high_share": high / tokens,
        "approx_kl": kl / tokens,
        "vllm_gap_mean": gap / tokens,
        "vllm_gap_max": passes[:, 5].max().item(),
        "skipped_sequences": len(samples) - len(live),
        "train_tokens": sum(len(sample.row) for sample in live),
    }


def diagnose(logprobs, old_logprobs, sampling_logprobs, advantages, mask, args) -> torch.Tensor:
    """Sums over tokens: their number, clipped low, clipped high, KL(old || new), |gap|; its max."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    gap = (old_logprobs - sampling_logprobs).abs()
    sums = [
        torch.ones_like(logprobs),
        (ratio < args.clip_low) & (advantages[:, None] < 0),
        (ratio > args.clip_high) & (advantages[:, None] > 0),
        ratio - 1 - log_ratio,  # estimates the KL without bias, and is never negative
        gap,
    ]
    return torch.stack([*((value * mask).sum() for value in sums), (gap * mask).max()])


# ------------------------------------------------------------------------------------------------
# Which checkpoint to evaluate


def select_step(
    rewards: Sequence[float], checkpoints: Sequence[int], window: int = 10, margin: float = 0.02
) -> int:
    """The step of the checkpoint where the reward reaches its plateau (section 4.5).

    A checkpoint's reward is the mean over the `window` optimizer steps around it: the half before,
    and the half from it on, as far as the run went. Of the checkpoints whose reward is within
    `margin` of the best one's, the first is chosen: a plateau's beginning, before it degrades.

    Args:
        rewards: by step; rewards[n] is of the answers that step n + 1 learnt from.
        checkpoints: steps after which one was saved.
        window: optimizer steps, an even number.
        margin: in units of the reward.
    """
    half = window // 2
    smoothed = {}
    for step in sorted(checkpoints):
        around = rewards[max(0, step - half) : step + half]
        smoothed[step] = sum(around) / len(around)
    best = max(smoothed.values())
    return next(step for step, reward in smoothed.items() if reward >= best - margin)


def print_selected(select_checkpoint: Path, window: int = 10, margin: float = 0.02) -> None:
    """Print the checkpoint where the reward reaches its plateau, by the rule in `select_step`.

    Args:
        select_checkpoint: the output_dir of a run of GRPO.
        window: optimizer steps over which the reward is smoothed, an even number.
        margin: below the best smoothed reward, at most.
    """
    metrics = select_checkpoint / "metrics.jsonl"
    if not metrics.is_file():
        raise InputError(f"{metrics}: no such file")
    if window < 2 or window % 2:
        raise InputError(f"--window must be an even number, got {window}")
    rewards = [row.get("reward") for _, row in read_rows(str(metrics))]
    if None in rewards:
        raise InputError(f"{metrics}: has no reward, so it is not a run of GRPO")
    folders = {int(path.name[-6:]): path for path in select_checkpoint.glob("checkpoint-*")}
    folders.pop(0, None)  # of a run that was stopped before its first step: the base model
    if not folders:
        raise InputError(f"{select_checkpoint}: there is no checkpoint")
    print(folders[select_step(rewards, list(folders), window, margin)])


if __name__ == "__main__":
    try:
        if any(argument.startswith("--select_checkpoint") for argument in sys.argv):
            tyro.cli(print_selected, use_underscores=True)
        else:
            train(parse_args(Args, __doc__))
    except (InputError, FloatingPointError, OSError) as error:
        exit_with(error)
