"""Pictures of training runs and of evaluations, one or several of them, as PNG.

    python -m paper.plot runs/sft runs/oswft runs/grpo        # all figures, to runs/plots
    python -m paper.plot runs/oswft                           # of one run, to runs/oswft/plots
    python -m paper.plot runs/*/eval                          # scores alone
    python -m paper.plot runs/*-oswft --figures mean_weight   # the paper's Figure 1
    python -m paper.plot runs/*-grpo --figures reward         # its Figure 2

Training is read from a run's metrics.jsonl: a thin line is what was measured, the thick one its
moving average. Scores are read from results.json of an evaluation, or of eval/ in a run; they come
with 95 % intervals. A figure shows the runs that have its numbers, and is left out if none has.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Literal

from arguments import one_line_errors
from data import InputError, read_rows
from paper import labels

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.figure import Figure

LINES = {  # name -> what the y axis shows, over the optimizer steps
    "mean_weight": "mean weight 1 − p̂",
    "reward": "mean reward (share of answers right)",
    "pass_rate": "pass rate p̂ (share right)",
    "loss": "loss (nats)",
}
FIGURES = (*LINES, "seconds", "scores", "pass_at_k")
PHASES = ("sync_s", "rollout_s", "verify_s", "train_s")
WINDOW = 10  # optimizer steps of the moving average
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
STYLE = {
    "figure.figsize": (4.5, 3.0),  # inches: half a page
    "figure.dpi": 200,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a run's name may hold dollars
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}


@dataclass
class PlottedRun:
    label: str
    numbers: dict  # by figure: a number for each step, seconds by phase, or results by benchmark
    color: np.ndarray  # the same in every figure, as are the dashes
    dashes: str | tuple


def read_numbers(folder: Path) -> dict:
    """Raises InputError if the folder holds neither a run nor an evaluation, or a damaged one."""
    metrics, results = folder / "metrics.jsonl", folder / "results.json"
    if not results.exists():
        results = folder / "eval" / "results.json"
    if not metrics.exists() and not results.exists():
        raise InputError(f"{folder}: holds neither metrics.jsonl nor results.json")
    numbers = {}
    if metrics.exists():
        rows = [row for _, row in read_rows(str(metrics))]
        if not rows:
            raise InputError(f"{metrics}: no step has been done")
        numbers = {
            key: [row[key] for row in rows] for key in LINES if all(key in row for row in rows)
        }
        if "reward" in numbers:  # GRPO
            numbers["pass_rate"] = numbers["reward"]
            del numbers["loss"]  # a surrogate about 0: no likelihood of anything
        numbers["seconds"] = [np.mean([row.get(phase, 0.0) for row in rows]) for phase in PHASES]
    if results.exists():
        scores = numbers["scores"] = json.loads(results.read_text())
        numbers["pass_at_k"] = {key: value for key, value in scores.items() if value["samples"] > 1}
    return numbers


def read_runs(folders: Sequence[Path]) -> list[PlottedRun]:
    """Runs, each with a label and a look of its own. Raises InputError like `read_numbers`."""
    if not folders:
        raise InputError("needs the folder of a run")
    numbers = [read_numbers(folder) for folder in folders]
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.8, len(folders)))  # dark to light
    return [PlottedRun(*parts) for parts in zip(labels(folders), numbers, colors, cycle(DASHES))]


def moving_average(values: Sequence[float], window: int) -> np.ndarray:
    """Mean over the `window` steps around each step, over fewer at the ends."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def draw_lines(runs: Sequence[PlottedRun], name: str) -> None:
    """A value over the optimizer steps: a thin line and its moving average for each run."""
    axes = plt.figure().subplots()
    for run in runs:
        values = run.numbers[name]
        steps = range(1, 1 + len(values))
        axes.plot(steps, values, color=run.color, alpha=0.25, linewidth=0.7)
        smooth = moving_average(values, WINDOW)
        axes.plot(steps, smooth, color=run.color, linestyle=run.dashes, label=run.label)
    axes.set(xlabel="optimizer step", ylabel=LINES[name])
    is_share = name != "loss" and max(max(run.numbers[name]) for run in runs) <= 1
    axes.set_ylim(0, 1 if is_share else None)
    axes.locator_params(axis="x", integer=True)
    axes.legend()


def draw_seconds(runs: Sequence[PlottedRun]) -> None:
    """A bar for each run, its phases next to each other."""
    axes = plt.figure().subplots()
    left, places = np.zeros(len(runs)), np.arange(len(runs))[::-1]
    for n, phase in enumerate(PHASES):
        means = np.array([run.numbers["seconds"][n] for run in runs])
        color = plt.get_cmap("viridis")(n / (len(PHASES) - 1))
        axes.barh(places, means, 0.6, left, label=phase.removesuffix("_s"), color=color)
        left += means
    axes.set_yticks(places, [run.label for run in runs])
    axes.set(xlabel="seconds per optimizer step")
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="outside upper center", ncols=len(PHASES))


def draw_scores(runs: Sequence[PlottedRun]) -> None:
    """pass@1: a group of bars for each benchmark, with 95 % intervals."""
    names = list(dict.fromkeys(name for run in runs for name in run.numbers["scores"]))
    axes = plt.figure(figsize=(max(4.5, 1 + 0.22 * len(names) * len(runs)), 3)).subplots()
    width = 0.8 / len(runs)
    for n, run in enumerate(runs):
        results = run.numbers["scores"]
        places = [names.index(name) + (n - (len(runs) - 1) / 2) * width for name in results]
        scores = 100 * np.array([result["pass@1"] for result in results.values()])
        bounds = 100 * np.array([result["pass@1_interval"] for result in results.values()]).T
        look = {"color": run.color, "label": run.label, "capsize": 2}
        axes.bar(places, scores, width, yerr=np.abs(bounds - scores), **look)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="pass@1 (%)", ylim=(0, 105))
    axes.grid(axis="x", visible=False)
    axes.figure.legend(loc="outside upper center", ncols=min(4, len(runs)))


def draw_pass_at_k(runs: Sequence[PlottedRun]) -> None:
    """A panel for each benchmark with several answers to a problem, pass@k over k."""
    names = list(dict.fromkeys(name for run in runs for name in run.numbers["pass_at_k"]))
    figure = plt.figure(figsize=(max(4.5, 2.2 * len(names)), 3))
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    shown = {}  # label -> one of its lines, for the legend
    for axes, name in zip(panels, names, strict=True):
        for run in runs:
            if result := run.numbers["pass_at_k"].get(name):
                k = np.arange(1, result["samples"] + 1)
                low, high = 100 * np.array([result[f"pass@{n}_interval"] for n in k]).T
                scores = [100 * result[f"pass@{n}"] for n in k]
                axes.fill_between(k, low, high, color=run.color, alpha=0.15, linewidth=0)
                (line,) = axes.plot(k, scores, color=run.color, linestyle=run.dashes)
                shown[run.label] = line
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(title=name, xlabel="k", ylim=(0, 105))
    panels[0].set_ylabel("pass@k (%)")
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=min(4, len(shown)))


def draw_figures(
    runs: Sequence[PlottedRun], figures: Sequence[str]
) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of those that have something to show, with the runs that have it."""
    plt.switch_backend("Agg")  # files, no window
    draw = {"seconds": draw_seconds, "scores": draw_scores, "pass_at_k": draw_pass_at_k}
    for name in figures:
        having = [run for run in runs if run.numbers.get(name)]
        if not having:
            continue
        with plt.rc_context(STYLE):
            if name in LINES:
                draw_lines(having, name)
            else:
                draw[name](having)
            yield name, plt.gcf()
            plt.close()


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output_dir: Path | None = None,
    figures: tuple[Literal[*FIGURES], ...] = FIGURES,
) -> None:
    """Write the figures that have something to show. Raises InputError.

    Args:
        runs: folders of runs or evaluations.
        output_dir: for <figure>.png; default: plots/ in the run's folder, or next to several runs.
        figures: which of them.
    """
    plotted = read_runs(runs)
    output_dir = output_dir or Path(os.path.commonpath(map(os.path.abspath, runs)), "plots")
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, figure in draw_figures(plotted, figures):
        figure.savefig(output_dir / f"{name}.png")
        print(output_dir / f"{name}.png")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(plot, description=__doc__, use_underscores=True)
