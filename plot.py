"""Pictures of training runs: from the metrics.jsonl of one or several runs to PNG.

    python plot.py runs/sft runs/oswft runs/grpo                    # every figure, into runs/plots
    python plot.py runs/*-oswft --figures mean_weight --by model    # the paper's Figure 1
    python plot.py runs/*-grpo --figures reward --by model learning_rate    # its Figure 2

A thin line is what was measured, the thick one its moving average. A figure shows the runs that
have its numbers, and is left out if none has.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")  # files, no window
import matplotlib.pyplot as plt
import numpy as np
import tyro

FIGURES = {  # name -> what the y axis shows
    "mean_weight": "mean weight $1 - \\hat{p}$",
    "reward": "mean reward (share of answers right)",
    "pass_rate": "pass rate $\\hat{p}$ (share right)",
    "loss": "loss (nats)",
    "seconds": "seconds per optimizer step",
}
PHASES = {
    "sync_s": "weights to vLLM",
    "rollout_s": "rollout",
    "verify_s": "verify",
    "train_s": "train",
}
HATCHES = ("", "///", "...", "xxx")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
STYLE = {
    "figure.figsize": (4.5, 3.0),  # inches: half a page
    "figure.dpi": 200,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]  # output folders of training scripts
    output_dir: Path = Path("runs/plots")  # for <figure>.png
    figures: tuple[str, ...] = tuple(FIGURES)  # which of them
    by: tuple[str, ...] = ()  # arguments that tell the runs apart; default: the folders' names
    window: int = 10  # optimizer steps of the moving average


def read_run(folder: Path, by: tuple[str, ...]) -> tuple[str, list[dict]]:
    """(label, rows of metrics.jsonl). Exits with one line if the folder holds no run."""
    try:
        text = (folder / "metrics.jsonl").read_text()
        args = json.loads((folder / "args.json").read_text())["args"]
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            sys.exit(f"error: {folder / 'metrics.jsonl'}:{number}: not JSON ({error})")
    if not rows:
        sys.exit(f"error: {folder / 'metrics.jsonl'}: no step has been done")
    for name in by:
        if name not in args:
            sys.exit(f"error: {folder}: has no argument '{name}'; it has {', '.join(args)}")
    label = ", ".join(Path(str(args[name])).name for name in by)
    return label or folder.name, rows


def series(figure: str, rows: list[dict]) -> np.ndarray | None:
    """The numbers of a line figure, one for each step; None if the run has none."""
    if figure == "loss" and "reward" in rows[0]:
        return None  # GRPO's is a surrogate about 0: no likelihood of anything
    key = "reward" if figure == "pass_rate" and "reward" in rows[0] else figure
    return np.array([row[key] for row in rows]) if key in rows[0] else None


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the `window` steps around each step, over fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    steps = np.arange(len(values))
    start = np.maximum(0, steps - window // 2)
    end = np.minimum(len(values), steps - window // 2 + window)
    return (sums[end] - sums[start]) / (end - start)


def draw_lines(picture, figure: str, runs: list[tuple[str, list[dict]]], window: int) -> bool:
    axes, drawn = picture.subplots(), False
    for n, (label, rows) in enumerate(runs):  # a run looks the same in every figure
        values = series(figure, rows)
        if values is None:
            continue
        steps = [row["step"] for row in rows]
        color = plt.get_cmap("viridis")(0.8 * n / max(1, len(runs) - 1))  # dark to light in grey
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.7)
        smooth = moving_average(values, window)
        axes.plot(steps, smooth, color=color, linestyle=LINES[n % len(LINES)], label=label)
        drawn = True
    axes.set(xlabel="optimizer step", ylabel=FIGURES[figure])
    axes.set_ylim(0, None if figure == "loss" else 1)
    axes.locator_params(axis="x", integer=True)
    if drawn:
        axes.legend()
    return drawn


def draw_seconds(picture, runs: list[tuple[str, list[dict]]]) -> bool:
    """A bar for each run, its phases side by side."""
    axes = picture.subplots()
    left = np.zeros(len(runs))
    positions = np.arange(len(runs))[::-1]
    for n, (phase, name) in enumerate(PHASES.items()):
        means = np.array([np.mean([row.get(phase, 0.0) for row in rows]) for _, rows in runs])
        axes.barh(
            positions,
            means,
            left=left,
            height=0.6,
            label=name,
            color=plt.get_cmap("viridis")(n / (len(PHASES) - 1)),
            hatch=HATCHES[n],
            edgecolor="white",
        )
        left += means
    axes.set_yticks(positions, [label for label, _ in runs])
    axes.set(xlabel=FIGURES["seconds"])
    axes.grid(axis="y", visible=False)
    picture.legend(loc="outside upper center", ncols=len(PHASES))
    return True


def plot(args: Args) -> None:
    unknown = set(args.figures) - set(FIGURES)
    if unknown or not args.runs or args.window < 1:
        known = f"known figures: {', '.join(FIGURES)}"
        sys.exit(f"error: needs runs, a window of 1 or more, and {known}")
    runs = [read_run(folder, args.by) for folder in args.runs]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for figure in args.figures:
        with plt.rc_context(STYLE):
            picture = plt.figure()
            if figure == "seconds":
                drawn = draw_seconds(picture, runs)
            else:
                drawn = draw_lines(picture, figure, runs, args.window)
            if drawn:
                picture.savefig(args.output_dir / f"{figure}.png")
                print(args.output_dir / f"{figure}.png")
            plt.close(picture)


if __name__ == "__main__":
    plot(tyro.cli(Args, description=__doc__, use_underscores=True))
