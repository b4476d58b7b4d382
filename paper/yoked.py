"""Arm C of docs/study/plan5.md: the weights of a run of OSW-FT, dealt to the rows at random.

    python -m paper.yoked --weights_of runs/oswft --model ... --data ... --seed ...

Each batch is that of the other run, and so are its weights; a seeded permutation says which row
gets which. So as many rows are skipped, and the weights' sum is the same: only which rows differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arguments import TrainArgs, claim_or_resume, keywords, load_training_data, run_script
from data import InputError, TokenizedExample, derive_seed, read_rows, write_rows
from engine import Engine, init_training, load_engine
from run import Run
from train_oswft import update

import torch


@dataclass(kw_only=True)
class Args(TrainArgs):
    weights_of: str  # folder of a run of train_oswft.py: same model, data, seed and batch sizes
    order: Literal["dealt", "own"] = "dealt"  # own: that run again, for a test
    output_dir: str = "runs/yoked"
    normalizer: Literal["token", "sequence"] = "token"
    learning_rate: float = 1e-5
    train_batch_size: int = 128


def logged_weights(run: Path, step: int, queries: Sequence[TokenizedExample]) -> torch.Tensor:
    """(B,) of the batch that began with this step. Raises InputError if it had other queries."""
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    weights = {row["id"]: row["weight"] for _, row in read_rows(str(path))}
    if [*weights] != [query.id for query in queries]:
        raise InputError(f"{path}: is of another batch")
    return torch.tensor([*weights.values()])


def main(args: Args) -> int:
    """Train; returns the exit status."""
    init_training()
    checkpoint = claim_or_resume(args)
    tokenizer, examples = load_training_data(args)
    engine = load_engine(args.model, args.max_length, checkpoint, **keywords(args, Engine))

    with Run(args.output_dir, engine, tokenizer, examples, **keywords(args, Run)) as run:
        for batch, queries in run.batches():
            weights = logged_weights(Path(args.weights_of), run.step + 1, queries)
            if args.order == "dealt":
                generator = torch.Generator().manual_seed(derive_seed(args.seed, batch, "yoked"))
                weights = weights[torch.randperm(len(weights), generator=generator)]
            if run.is_rank_0:
                pairs = zip(queries, weights.tolist(), strict=True)
                path = run.folder / "weights" / f"step_{run.step + 1:06d}.jsonl"
                write_rows(({"id": query.id, "weight": weight} for query, weight in pairs), path)
            run.end_step(update(engine, queries, weights, args))
    return 0 if run.finished else 130  # 130 is the status after Ctrl-C.


if __name__ == "__main__":
    run_script(main, Args, __doc__)
