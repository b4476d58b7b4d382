"""Which checkpoint of a GRPO run to evaluate: the one where the reward reaches its plateau.

    python -m paper.select_checkpoint runs/grpo                # prints its folder
    python -m paper.select_checkpoint runs/grpo --window 20 --margin 0.01

The paper says no more than that: the plateau, before the reward degrades (section 4.5). The exact
rule is ours, in `select_step`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from data import InputError, read_rows
from run import checkpoints


def select_step(
    rewards: Sequence[float], checkpoints: Sequence[int], window: int = 10, margin: float = 0.02
) -> int:
    """The step of the checkpoint where the reward reaches its plateau.

    A checkpoint's reward is the mean over the `window` optimizer steps around it: half of them
    before it was saved, half after, as far as the run went. Of the checkpoints whose reward is
    within `margin` of the best, the first is chosen: where the plateau begins, before it degrades.

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


def select_checkpoint(run: Path, window: int = 10, margin: float = 0.02) -> Path:
    """The folder of the checkpoint that `select_step` chooses.

    Args:
        run: the output_dir of a run of GRPO.
        window: optimizer steps over which the reward is smoothed, an even number.
        margin: how far below the best smoothed reward is still good enough.

    Raises InputError if the folder holds no run of GRPO with a checkpoint.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise InputError(f"{metrics}: no such file")
    if window < 2 or window % 2:
        raise InputError(f"--window must be an even number, got {window}")
    if not margin >= 0:
        raise InputError(f"--margin must not be below 0, got {margin}")
    rewards = [row.get("reward") for _, row in read_rows(str(metrics))]
    if None in rewards:
        raise InputError(f"{metrics}: has no reward, so it is not a run of GRPO")
    folders = checkpoints(run)
    folders.pop(0, None)  # of a run that was stopped before its first step: the base model
    if not folders:
        raise InputError(f"{run}: there is no checkpoint")
    return folders[select_step(rewards, list(folders), window, margin)]


if __name__ == "__main__":
    try:
        config = (tyro.conf.PositionalRequiredArgs,)
        print(tyro.cli(select_checkpoint, description=__doc__, config=config, use_underscores=True))
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
