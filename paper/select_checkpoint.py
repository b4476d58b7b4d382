"""Which checkpoint of a GRPO run to evaluate: the one where the reward reaches its plateau.

    python -m paper.select_checkpoint runs/grpo    # prints its folder

The paper says no more than that: the plateau, before the reward degrades (section 4.5). The exact
rule is ours, in `select_step`.
"""

from collections.abc import Sequence
from pathlib import Path

from data import InputError, read_rows
from launch import command_line
from run import checkpoints

import numpy as np
import tyro

WINDOW = 10  # optimizer steps over which the reward is smoothed, an even number
MARGIN = 0.02  # how far below the best smoothed reward is still good enough


def select_step(rewards: Sequence[float], checkpoints: Sequence[int]) -> int | None:
    """The step of the checkpoint where the reward reaches its plateau.

    A checkpoint's reward is the mean over the WINDOW optimizer steps around it: half of them
    before it was saved, half after, as far as the run went. Of the checkpoints whose reward is
    within MARGIN of the best, the first is chosen: where the plateau begins, before it degrades.
    None if rows are missing around each of them.

    Args:
        rewards: by step; rewards[n] is of the answers that step n + 1 learnt from. NaN if its row
            is lost: a checkpoint near it is left out.
        checkpoints: steps after which one was saved, in rising order.
    """
    half = WINDOW // 2
    smoothed = [np.mean(rewards[max(0, step - half) : step + half]) for step in checkpoints]
    known = {step: mean for step, mean in zip(checkpoints, smoothed, strict=True) if mean == mean}
    good = (step for step, mean in known.items() if mean >= max(known.values()) - MARGIN)
    return next(good, None)


def select_checkpoint(run: Path) -> Path:
    """The folder of the checkpoint that `select_step` chooses. Raises InputError if there is none.

    Args:
        run: the output_dir of a run of GRPO.
    """
    rows = [row for _, row in read_rows(str(run / "metrics.jsonl"))]
    rewards = {row["step"]: row.get("reward") for row in rows}
    folders = checkpoints(run)
    if None in rewards.values() or not folders:
        raise InputError(f"{run}: is not a run of GRPO with a checkpoint")
    by_step = [rewards.get(step, np.nan) for step in range(1, max(rewards) + 1)]
    if not (step := select_step(by_step, list(folders))):
        raise InputError(f"{run}/metrics.jsonl lacks rows around each checkpoint")
    return folders[step]


if __name__ == "__main__":
    with command_line():
        config = (tyro.conf.PositionalRequiredArgs,)
        print(tyro.cli(select_checkpoint, description=__doc__, config=config, use_underscores=True))
