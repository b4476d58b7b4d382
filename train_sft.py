"""Supervised fine-tuning: every expert solution o* to a question q is learnt in full.

The baseline of the paper. Weight 1 in place of OSW-FT's 1 - p̂, no rollouts, no verifier:

    loss = - sum over the batch of  log pi(o* | q)  /  solution tokens of the global batch

`--weight_column weight` takes each solution's weight from the data: with 1 - p̂ from answers of the
base model that is OSW-FT's offline form (docs/training-set.md).

    deepspeed --quiet train_sft.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    deepspeed --quiet train_sft.py --resume runs/sft      # more ways to start: train_oswft.py
"""

import math
from dataclasses import dataclass

from data import InputError, Queries, count_rows
from engine import Engine, EngineArgs, init_training, load_engine
from launch import claim_or_resume, load_training_data, run_script
from run import Run, RunArgs

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Args(EngineArgs, RunArgs):
    """This method's flags; each base's file has the others."""

    output_dir: str = "runs/sft"  # where the run writes; all hosts share it

    # The method
    weight_column: str | None = None  # column of the data with the weights; default: all are 1

    # Optimization
    learning_rate: float = 1e-5  # learning rate of AdamW, constant
    train_batch_size: int = 128  # queries per optimizer step


# ---- The method ----------------------------------------------------------------------------------


def sft_loss(logprobs: Tensor, mask: Tensor, normalizer: float) -> Tensor:
    """-(sum of log pi(o*|q)) / normalizer: a micro-batch's share of the loss.

    Args:
        logprobs: (B, T) log pi of each token of the expert solutions.
        mask: (B, T), true on these tokens, false on prompt and padding.
        normalizer: solution tokens of the whole step: all ranks, weight 0 included.
    """
    return -torch.where(mask.bool(), logprobs, 0).sum() / normalizer


def get_weights(queries: Queries, column: str | None) -> Tensor:
    """(B,) from a column, or ones. Raises InputError for all but finite numbers of 0 or more."""
    weights = []
    for query in queries:
        weight = query.example.columns.get(column) if column else 1.0
        if type(weight) not in (int, float) or not 0 <= weight < math.inf:
            where = f"{query.example.where}: field '{column}'"
            raise InputError(f"{where} must be a number of 0 or more, not {weight!r}")
        weights.append(float(weight))
    return torch.tensor(weights)


def update(engine: Engine, queries: Queries, weights: Tensor, args: Args) -> dict[str, float]:
    """One optimizer step on the global batch, with weights (B,); returns its metrics."""
    normalizer = sum(len(query.response_ids) for query in queries)
    weights = weights.to(engine.device)
    for batch in engine.micro_batches(queries, keep=weights > 0):  # this rank's share
        logprobs = engine.logprobs(batch)  # (b, T)
        weighted = logprobs * weights[batch.indices, None]  # all 1 without --weight_column
        loss = sft_loss(weighted, batch.mask, normalizer)
        engine.backward(loss, batch.is_last)  # gradients add up over micro-batches and ranks
    stats = engine.step(args.learning_rate)
    mean = {"mean_weight": weights.mean().item()} if args.weight_column else {}
    return {**mean, **stats, **count_rows(queries, keep=weights > 0)}


# ---- The loop ------------------------------------------------------------------------------------


def main(args: Args) -> int:
    """Train; returns the exit status."""
    init_training()
    checkpoint = claim_or_resume(args)
    tokenizer, examples = load_training_data(args)
    if not get_weights(examples, args.weight_column).any():
        raise InputError(f"{args.data}: every '{args.weight_column}' is 0: nothing would be learnt")
    engine = load_engine(args.model, args, checkpoint)

    with Run(args, engine, tokenizer, examples) as run:
        for _, queries in run.batches():  # the same on every rank
            weights = get_weights(queries, args.weight_column)  # (B,)
            run.end_step(update(engine, queries, weights, args))
    return run.status


if __name__ == "__main__":
    run_script(main, Args, __doc__)
