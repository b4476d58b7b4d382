"""Supervised fine-tuning: every expert solution o* to a question q is learnt in full.

The baseline of the paper. Weight 1 in place of OSW-FT's 1 - p̂, no rollouts, no verifier:

    loss = - sum over the batch of  log pi(o* | q)  /  completion tokens of the global batch

`--objective dft` is an offline reweighting that the paper's related work names, not a row of its
tables (Dynamic Fine-Tuning, arXiv 2508.05629): each token's loss is scaled by that token's own
probability, held constant, so that what the model finds unlikely pulls less. `train_oswft.py
--weighting uniform` takes the same steps as this script, at the price of rollouts it does not use.

    deepspeed train_sft.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    deepspeed --num_gpus 1 train_sft.py ...                  # one GPU of several
    deepspeed --hostfile hosts train_sft.py ...              # several hosts, a shared output_dir
    deepspeed train_sft.py ... --resume                      # go on from the newest checkpoint
"""

from dataclasses import dataclass
from typing import Literal

import torch

from data import InputError, TokenizedExample, batch_indices
from engine import (
    Engine,
    Run,
    TrainArgs,
    exit_with,
    init_distributed,
    load_training_data,
    parse_args,
)


@dataclass
class Args(TrainArgs):
    output_dir: str = "runs/sft"  # for all that the run leaves; all hosts share it
    learning_rate: float = 1e-5  # constant

    # The method
    objective: Literal["sft", "dft"] = "sft"  # plain, or scaled by each token's probability


# ------------------------------------------------------------------------------------------------
# The method


def sft_loss(
    logprobs: torch.Tensor, mask: torch.Tensor, normalizer: float, objective: str = "sft"
) -> torch.Tensor:
    """- sum of log pi(o*|q) / normalizer.

    Args:
        logprobs: (B, T) log pi of each token of the expert solutions.
        mask: (B, T), true on the solutions' tokens, false on prompt and padding.
        normalizer: completion tokens in the *global* batch.
        objective: "sft", or "dft": each token's term times its probability, no gradient through it.

    Returns:
        a scalar; summed over any split of the batch, it is the loss of the whole batch.
    """
    token_weights = logprobs.exp().detach() if objective == "dft" else 1.0  # (B, T)
    return -torch.where(mask.bool(), token_weights * logprobs, 0).sum() / normalizer


# ------------------------------------------------------------------------------------------------
# The loop


def train(args: Args) -> None:
    args.check(world_size=init_distributed())
    run = Run(args)
    tokenizer, examples = load_training_data(args)
    engine = Engine.from_args(args)
    max_steps = args.num_steps(len(examples))
    step = run.start(engine, max_steps)

    while step < max_steps:
        order = batch_indices(len(examples), args.batch_size, step, args.seed)
        rows = [examples[i] for i in order]  # the same on every rank

        # ---- update: one optimizer step
        stats = update(engine, rows, args)
        step += 1
        run.lap("train_s")
        run.log({"step": step, "epoch": step * len(rows) / len(examples), **stats})
        if step % args.save_every == 0:
            run.save_checkpoint(engine, tokenizer, step)
        if run.should_stop():
            break
    run.finish(engine, tokenizer, step)


def update(engine: Engine, rows: list[TokenizedExample], args: Args) -> dict[str, float]:
    """One optimizer step on expert solutions; returns its metrics."""
    normalizer = sum(len(row.completion_ids) for row in rows)

    def loss_fn(logprobs, mask, i):  # (B, T), (B, T), B of the rows
        return sft_loss(logprobs, mask, normalizer, args.objective)

    stats = engine.update(rows, loss_fn, args.max_tokens_per_micro_batch)
    return {**stats, "train_tokens": sum(len(row) for row in rows)}


if __name__ == "__main__":
    try:
        train(parse_args(Args, __doc__))
    except (InputError, FloatingPointError, OSError) as error:
        exit_with(error)
