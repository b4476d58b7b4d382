"""Pictures of training runs, one or several of them, as PNG.

    python -m look.plot runs/sft runs/oswft runs/grpo        # all figures, to runs/plots
    python -m look.plot runs/*-oswft --figures mean_weight   # the paper's Figure 1
    python -m look.plot runs/*-grpo --figures reward         # its Figure 2

A thin line is what was measured, the thick one its moving median. A figure shows the runs that
have its numbers, and is left out if none has.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Literal

from data import InputError, read_rows
from launch import command_line
from look import STYLE, labels, next_to

os.environ["MPLBACKEND"] = "agg"  # A notebook names one that may not be installed here.
import numpy as np
import tyro
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

FIGURES = {  # name -> what the y axis shows, over the optimizer steps
    "mean_weight": "mean weight 1 − p̂",
    "reward": "mean reward (share of answers right)",
    "pass_rate": "pass rate p̂ (share right)",
    "loss": "loss (nats; OSW-FT: weighted)",
}
DEFAULT = tuple(name for name in FIGURES if name != "reward")  # which pass_rate shows, too
REACH = 5  # optimizer steps on either side of a moving median
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def read_numbers(folder: Path) -> dict[str, list[float]]:
    """A number for each step from the first, by figure; NaN where the step's row is lost.

    Raises InputError without a step, or at a damaged one.
    """
    path = folder / "metrics.jsonl"
    rows = {row["step"]: row for _, row in read_rows(str(path))}
    if not rows:
        raise InputError(f"{path}: no step has been done")
    found = [name for name in FIGURES if all(name in row for row in rows.values())]
    steps = range(1, max(rows) + 1)
    numbers = {name: [rows.get(step, {}).get(name, np.nan) for step in steps] for name in found}
    if "reward" in numbers:  # GRPO
        numbers["pass_rate"] = numbers["reward"]
        del numbers["loss"]  # a surrogate about 0: no likelihood of anything
    return numbers


def moving_median(values: Sequence[float], reach: int) -> list[float]:
    """Median of each step and `reach` on either side: near an end fewer, on both sides alike.

    NaN stays NaN, and is left out of the medians around it.
    """
    sides = [min(reach, n, len(values) - 1 - n) for n in range(len(values))]
    return [
        value if np.isnan(value) else np.nanmedian(values[n - side : n + side + 1])
        for n, (value, side) in enumerate(zip(values, sides, strict=True))
    ]


def draw_figures(folders: Sequence[Path], figures: Sequence[str]) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of those that some run has numbers for. Raises InputError."""
    if not folders:
        raise InputError("needs the folder of a run")
    colors = colormaps["viridis"](np.linspace(0, 0.8, len(folders)))  # dark to light
    runs = [*zip(labels(folders), map(read_numbers, folders), colors, cycle(DASHES))]
    for name in figures:
        having = [(run, numbers[name], *look) for run, numbers, *look in runs if name in numbers]
        if not having:
            continue
        with rc_context(STYLE):
            figure = Figure()
            axes = figure.subplots()
            for run, values, color, dashes in having:  # the same look in every figure
                steps = range(1, 1 + len(values))
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.7)
                smooth = moving_median(values, REACH)
                axes.plot(steps, smooth, color=color, linestyle=dashes, label=run)
            axes.set(xlabel="optimizer step (thick: moving median)", ylabel=FIGURES[name])
            is_share = name != "loss" and max(np.nanmax(values) for _, values, *_ in having) <= 1
            axes.set_ylim(0, 1 if is_share else None)
            axes.locator_params(axis="x", integer=True)
            axes.legend()
            yield name, figure


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output_dir: Path | None = None,
    figures: tuple[Literal[*FIGURES], ...] = DEFAULT,
) -> None:
    """Write the figures that have something to show. Raises InputError.

    Args:
        runs: their folders.
        output_dir: for <figure>.png; default: <run>-plots, or plots/ next to several runs.
        figures: which of them.
    """
    for name, figure in draw_figures(runs, figures):
        folder = output_dir or next_to(runs, "plots")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.png")
        print(folder / f"{name}.png")


if __name__ == "__main__":
    with command_line():
        tyro.cli(plot, description=__doc__, use_underscores=True)
