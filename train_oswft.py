"""Online Self-Weighted Fine-Tuning: supervised fine-tuning, weighted by how often the model fails.

Each expert solution o* to a question q has weight 1 - p̂ in the loss. p̂ is the share of right
answers among K that the current model samples (Algorithm 1 of the paper):

    loss = - sum over the batch of  (1 - p̂(q)) * log pi(o* | q)  /  normalizer

If all K are right, the solution is not trained on; if none is, it has full weight. No gradient
flows through the weight, and none ever comes from a sampled answer. Deviations from the paper's
text: the normalizer is the number of solution tokens in the global batch, so that weight 1 gives
standard token-mean SFT (`--normalizer sequence` divides by the number of queries, as Algorithm 1
does); ZeRO's stage is 2. On clipping the paper is silent: gradients are clipped at norm 1.

    deepspeed --quiet train_oswft.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    python train_oswft.py ...                               # one process, no launcher
    deepspeed --quiet --hostfile hosts train_oswft.py ...   # several hosts, a shared output_dir
    deepspeed --quiet train_oswft.py --resume runs/oswft    # continue a stopped run
"""

from dataclasses import dataclass
from typing import Literal

from data import Queries, count_rows, derive_seed
from engine import Engine, EngineArgs, init_training, load_engine
from launch import check_solutions, claim_or_resume, load_training_data, run_script
from rollout import Rollout, RolloutArgs, completion_stats, judge
from run import Run, RunArgs
from verify import Verifier

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Args(RolloutArgs, EngineArgs, RunArgs):
    """This method's flags; each base's file has the others."""

    output_dir: str = "runs/oswft"  # where the run writes; all hosts share it

    # The method
    num_rollouts: int = 2  # K, answers sampled per query
    weighting: Literal["oswft", "hard", "random"] = "oswft"  # the method, or a control
    normalizer: Literal["token", "sequence"] = "token"  # divide by tokens, or by queries

    # Optimization
    learning_rate: float = 1e-5  # learning rate of AdamW, constant
    train_batch_size: int | None = None  # queries per optimizer step; None: the rollout batch


# ---- The method ----------------------------------------------------------------------------------


def oswft_weights(rewards: Tensor) -> Tensor:
    """w = 1 - p̂: (B, K) rewards in [0, 1] -> (B,) constants (Algorithm 1, line 7).

    One of two answers to 7+5*3 is right, and both to 1+2:

    >>> oswft_weights(torch.tensor([[1., 0.], [1., 1.]]))
    tensor([0.5000, 0.0000])
    """
    return 1 - rewards.detach().float().mean(dim=1)


def oswft_loss(logprobs: Tensor, mask: Tensor, weights: Tensor, normalizer: float) -> Tensor:
    """-(sum of w * log pi(o*|q)) / normalizer: a micro-batch's share (Algorithm 1, line 10).

    Args:
        logprobs: (B, T) log pi of each token of the expert solutions.
        mask: (B, T), true on these tokens, false on prompt and padding.
        weights: (B,) constants, from `oswft_weights`.
        normalizer: solution tokens (or queries) of the whole step: all ranks, weight 0 included.
            It is never the sum of the weights: dividing by that would undo the weighting.

    7+5*3 and 1+2 as `collate` packs them, with log pi = -1 for each token:

    >>> mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]])
    >>> oswft_loss(-1.0 * mask, mask, torch.tensor([0.5, 0.0]), normalizer=4)  # 0.5 * 2 / 4
    tensor(0.2500)
    """
    assert weights.shape == logprobs.shape[:1], "one weight for each row"  # (B, 1) would broadcast.
    assert not weights.requires_grad, "no gradient flows through a weight: detach it"
    sequence_logprobs = torch.where(mask.bool(), logprobs, 0).sum(dim=1)  # (B, T) -> (B,)
    return -(weights * sequence_logprobs).sum() / normalizer


def update(engine: Engine, queries: Queries, weights: Tensor, args: Args) -> dict[str, float]:
    """One optimizer step on the global batch, with weights (B,); returns its metrics."""
    num_tokens = sum(len(query.response_ids) for query in queries)  # solutions only
    normalizer = num_tokens if args.normalizer == "token" else len(queries)
    weights = weights.to(engine.device)
    for batch in engine.micro_batches(queries, keep=weights > 0):  # this rank's share
        logprobs = engine.logprobs(batch)  # (b, T)
        loss = oswft_loss(logprobs, batch.mask, weights[batch.indices], normalizer)
        engine.backward(loss, batch.is_last)  # gradients add up over micro-batches and ranks
    stats = engine.step(args.learning_rate)
    return {
        "mean_weight": weights.mean().item(),
        **stats,
        **count_rows(queries, keep=weights > 0),
        "weight_0_share": (weights == 0).float().mean().item(),
        "weight_between_share": ((weights > 0) & (weights < 1)).float().mean().item(),
        "weight_1_share": (weights == 1).float().mean().item(),
    }


# ---- Controls (section 4.4 of the paper) ---------------------------------------------------------


def control_weights(
    rewards: Tensor, strategy: str, generator: torch.Generator | None = None
) -> Tensor:
    """Weights to compare OSW-FT's with: (B, K) rewards -> (B,)."""
    weights = oswft_weights(rewards)
    match strategy:
        case "hard":  # 0 if all K answers are right, else 1
            return (weights > 0).float()
        case "random":  # evenly spread around OSW-FT's mean weight, and dealt at random
            order = torch.randperm(len(weights), generator=generator)
            spread = (2 * order + 1) / len(weights) - 1  # evenly spaced in (-1, 1), shuffled
            reach = min(weights.mean(), 1 - weights.mean())  # so that all lie in [0, 1]
            return weights.mean() + reach * spread
    raise ValueError(f"unknown weighting strategy '{strategy}'")


# ---- The loop ------------------------------------------------------------------------------------


def main(args: Args) -> int:
    """Train; returns the exit status."""
    init_training()
    checkpoint = claim_or_resume(args)
    tokenizer, examples = load_training_data(args)
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
            # ---- sample: K answers to each query
            completions = rollout.sample(queries, number, stop=run.stop_requested)  # (B, K)
            if run.should_stop():  # Answers may be missing; `run` saves a checkpoint.
                break
            gap = engine.check_vllm(queries, completions, args.temperature, strict=run.at_start)
            run.lap("rollout_s")

            # ---- judge: which are right?
            rewards = judge(verifier, queries, completions)  # (B, K)

            # ---- weigh: w = 1 - p̂
            weights = oswft_weights(rewards)  # (B,)
            if args.weighting != "oswft":
                generator = torch.Generator().manual_seed(derive_seed(args.seed, number, "weights"))
                weights = control_weights(rewards, args.weighting, generator)
            run.save_rollouts(queries, completions, rewards, weight=weights)
            run.lap("verify_s")

            # ---- update: one optimizer step per `train_batch_size` queries
            for part in run.parts(queries):
                stats = update(engine, queries[part], weights[part], args)
                sampled = completion_stats(completions[part])
                run.end_step({"pass_rate": rewards[part].mean().item(), **stats, **gap, **sampled})
    return run.status


if __name__ == "__main__":
    run_script(main, Args, __doc__)
