"""Online Self-Weighted Fine-Tuning: supervised fine-tuning, weighted by how badly the model fails.

Every expert solution o* to a question q is learnt with weight 1 - p̂, where p̂ is the share of K
answers, sampled from the current model, that are right (Algorithm 1 of the paper):

    loss = - sum over the batch of  (1 - p̂(q)) * log pi(o* | q)  /  normalizer

What the model has mastered costs nothing; what it fails at is learnt in full. No gradient flows
through the weight, and none ever comes from a sampled answer. Deviations from the paper's text: the
normalizer is the number of completion tokens in the global batch, so that weight 1 gives standard
token-mean SFT (`--normalizer sequence` divides by the number of queries, as Algorithm 1 does);
gradients are clipped at norm 1. Everything else, by default, is the paper's setting.

    deepspeed train_oswft.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    deepspeed --num_gpus 1 train_oswft.py ...                  # one GPU of several
    deepspeed --hostfile hosts train_oswft.py ...              # several hosts, a shared output_dir
    deepspeed train_oswft.py ... --resume                      # go on from the newest checkpoint
"""

from dataclasses import dataclass
from typing import Literal

import torch

from data import InputError, TokenizedExample, batch_indices, derive_seed
from engine import (
    Engine,
    RolloutArgs,
    Run,
    check_answers,
    exit_with,
    init_distributed,
    load_training_data,
    parse_args,
)
from rollout import Rollout, completion_stats
from verify import Verifier


@dataclass
class Args(RolloutArgs):
    output_dir: str = "runs/oswft"  # for all that the run leaves; all hosts share it
    learning_rate: float = 1e-5  # constant

    # The method
    num_rollouts: int = 2  # K, answers sampled per query
    weighting: Literal["oswft", "hard", "random", "uniform"] = "oswft"  # the paper's ablation
    normalizer: Literal["token", "sequence"] = "token"  # what the summed loss is divided by


# ------------------------------------------------------------------------------------------------
# The method


def oswft_weights(
    rewards: torch.Tensor, strategy: str = "oswft", generator: torch.Generator | None = None
) -> torch.Tensor:
    """w = 1 - p̂, the share of a query's K answers that are wrong (Algorithm 1, line 7).

    Args:
        rewards: (B, K), 1 for a right answer, 0 for a wrong one.
        strategy: "oswft", or a control that it is compared with (section 4.4):
            "hard": 0 if all K answers are right, else 1;
            "random": uniform, whichever queries fail, with the batch mean that "oswft" would have;
            "uniform": 1, which is SFT at the cost of the rollouts.
        generator: of the random weights.

    Returns:
        (B,) weights in [0, 1]; constants, as no gradient may flow through them.

    >>> oswft_weights(torch.tensor([[1., 1.], [1., 0.], [0., 0.]]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    weights = 1 - rewards.detach().float().mean(dim=1)  # 1 - p̂: (B, K) -> (B,)
    match strategy:
        case "oswft":
            return weights
        case "hard":
            return (weights > 0).float()
        case "random":
            # An even grid on [-1, 1] in random order: its mean is 0, not only on average.
            grid = (2 * torch.randperm(len(weights), generator=generator) + 1) / len(weights) - 1
            mean = weights.mean()
            return mean + torch.minimum(mean, 1 - mean) * grid
        case "uniform":
            return torch.ones_like(weights)
    raise ValueError(f"unknown weighting strategy '{strategy}'")


def oswft_loss(
    logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, normalizer: float
) -> torch.Tensor:
    """- sum of w * log pi(o*|q) / normalizer (Algorithm 1, line 10).

    Args:
        logprobs: (B, T) log pi of each token of the expert solutions.
        mask: (B, T), true on the solutions' tokens, false on prompt and padding.
        weights: (B,) from `oswft_weights`.
        normalizer: completion tokens, or queries, in the *global* batch, queries of weight 0
            included. Never the sum of the weights: that would cancel the method.

    Returns:
        a scalar; summed over any split of the batch, it is the loss of the whole batch.
    """
    sequence_logprobs = torch.where(mask.bool(), logprobs, 0).sum(dim=1)  # (B, T) -> (B,)
    return -(weights * sequence_logprobs).sum() / normalizer


# ------------------------------------------------------------------------------------------------
# The loop


def train(args: Args) -> None:
    args.check(world_size=init_distributed())
    run = Run(args)
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

            # ---- rollout: K answers to each query, from the current weights
            rollout.load_weights(engine.named_weights())
            run.lap("sync_s")
            completions = rollout.generate(
                [query.prompt_ids for query in queries],
                num_samples=args.num_rollouts,
                max_tokens=args.max_completion_length,
                seeds=[derive_seed(args.seed, batch, query.example.id) for query in queries],
                temperature=args.temperature,
                on_progress=run.on_rollout,
            )  # this rank's share
            rollout.sleep()
            if run.should_stop():  # nothing was learnt since the last step
                break
            run.lap("rollout_s")

            # ---- verify: which answers are right?
            answers, rewards = check_answers(verifier, completions, queries)  # rewards (B, K)

            # ---- weigh: w = 1 - p̂
            generator = torch.Generator().manual_seed(derive_seed(args.seed, batch, "weights"))
            weights = oswft_weights(rewards, args.weighting, generator)  # (B,)
            run.save_rollouts(step + 1, queries, answers, pass_rate=rewards.mean(1), weight=weights)
            run.lap("verify_s")

            # ---- update: one optimizer step per `train_batch_size` queries
            size = len(queries) // args.steps_per_batch
            for start in range(0, len(queries), size):
                piece = slice(start, start + size)
                stats = update(engine, queries[piece], weights[piece], args)
                step += 1
                run.lap("train_s")
                sampled = [answer for answer, _ in answers if start <= answer.query < start + size]
                run.log(
                    {
                        "step": step,
                        "epoch": step * size / len(examples),
                        "mean_weight": weights[piece].mean().item(),
                        "pass_rate": rewards[piece].mean().item(),
                        **stats,
                        **completion_stats(sampled),
                    }
                )
            if step % args.save_every < args.steps_per_batch:
                run.save_checkpoint(engine, tokenizer, step)
            if run.should_stop():
                break
    run.finish(engine, tokenizer, step)


def update(
    engine: Engine, rows: list[TokenizedExample], weights: torch.Tensor, args: Args
) -> dict[str, float]:
    """One optimizer step on expert solutions with their weights (B,); returns its metrics."""
    completion_tokens = sum(len(row.completion_ids) for row in rows)
    normalizer = completion_tokens if args.normalizer == "token" else len(rows)

    # Weight 0 means no gradient, so these rows are left out; the normalizer still counts them.
    live = weights.nonzero()[:, 0]

    def loss_fn(logprobs, mask, i):  # (B, T), (B, T), B of the live rows
        row_weights = weights[live[i]].to(logprobs.device, non_blocking=True)
        return oswft_loss(logprobs, mask, row_weights, normalizer)

    stats = engine.update([rows[i] for i in live], loss_fn, args.max_tokens_per_micro_batch)
    return {
        **stats,
        "weight_0_share": (weights == 0).float().mean().item(),
        "weight_between_share": ((weights > 0) & (weights < 1)).float().mean().item(),
        "weight_1_share": (weights == 1).float().mean().item(),
        "skipped_sequences": len(rows) - len(live),
        "train_tokens": sum(len(rows[i]) for i in live),
    }


if __name__ == "__main__":
    try:
        train(parse_args(Args, __doc__))
    except (InputError, FloatingPointError, OSError) as error:
        exit_with(error)
