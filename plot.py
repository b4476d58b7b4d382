"""Pictures of training runs and of evaluations, one or several of them, as PNG.

    python plot.py runs/sft runs/oswft runs/grpo                    # every figure, into runs/plots
    python plot.py runs/*/eval                                      # scores alone
    python plot.py runs/*-oswft --figures mean_weight --by model    # the paper's Figure 1
    python plot.py runs/*-grpo --figures reward --by model learning_rate    # its Figure 2

Training is read from a run's metrics.jsonl: a thin line is what was measured, the thick one its
moving average. Scores are read from results.json of an evaluation, or of eval/ in a run; they come
with 95 % intervals. A figure shows the runs that have its numbers, and is left out if none has.
"""

import functools
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
    "scores": "pass@1 (%)",
    "pass_at_k": "pass@k (%)",
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
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]  # folders of runs or evaluations
    output_dir: Path = Path("runs/plots")  # for <figure>.png
    figures: tuple[str, ...] = tuple(FIGURES)  # which of them
    by: tuple[str, ...] = ()  # arguments that tell the runs apart; default: the folders' names
    window: int = 10  # optimizer steps of the moving average


@dataclass
class Run:
    label: str
    rows: list[dict]  # of metrics.jsonl, one for each step; none for an evaluation
    results: dict[str, dict]  # by benchmark; none if it was not evaluated
    color: tuple = ()
    line: str | tuple = "-"
    hatch: str = ""


def read_run(folder: Path, by: tuple[str, ...]) -> Run:
    """Exits with one line if the folder holds neither a run nor an evaluation."""
    metrics, results = folder / "metrics.jsonl", folder / "results.json"
    if not results.exists():
        results = folder / "eval" / "results.json"
    if not metrics.exists() and not results.exists():
        sys.exit(f"error: {folder}: holds neither metrics.jsonl nor results.json")
    rows = []
    if metrics.exists():
        rows = [read_json(f"{metrics}:{n}", line) for n, line in enumerate(metrics.open(), start=1)]
        if not rows:
            sys.exit(f"error: {metrics}: no step has been done")
    path = (metrics if metrics.exists() else results).with_name("args.json")
    args = read_json(path, path.read_text())["args"] if by else {}
    for name in by:
        if name not in args:
            sys.exit(f"error: {folder}: has no argument '{name}'; it has {', '.join(args)}")
    label = ", ".join(Path(str(args[name])).name for name in by)
    absolute = folder.resolve()  # runs/oswft/eval is called oswft
    name = (absolute.parent if absolute.name == "eval" else absolute).name
    scores = read_json(results, results.read_text()) if results.exists() else {}
    if not all("pass@1" in result for result in scores.values()):
        sys.exit(f"error: {results}: not written by evaluate.py")
    return Run(label or name, rows, scores)


def read_json(where: str | Path, text: str) -> dict:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        sys.exit(f"error: {where}: not JSON ({error})")


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


def draw_lines(figure: str, window: int, runs: list[Run]) -> bool:
    runs = [run for run in runs if run.rows and series(figure, run.rows) is not None]
    axes = plt.figure().subplots()
    for run in runs:
        steps, values = [row["step"] for row in run.rows], series(figure, run.rows)
        axes.plot(steps, values, color=run.color, alpha=0.25, linewidth=0.7)
        smooth = moving_average(values, window)
        axes.plot(steps, smooth, color=run.color, linestyle=run.line, label=run.label)
    axes.set(xlabel="optimizer step", ylabel=FIGURES[figure])
    axes.set_ylim(0, None if figure == "loss" else 1)
    axes.locator_params(axis="x", integer=True)
    if runs:
        axes.legend()
    return bool(runs)


def draw_seconds(runs: list[Run]) -> bool:
    """A bar for each run, its phases side by side."""
    runs = [run for run in runs if run.rows]
    axes = plt.figure().subplots()
    left = np.zeros(len(runs))
    positions = np.arange(len(runs))[::-1]
    for n, (phase, name) in enumerate(PHASES.items()):
        means = np.array([np.mean([row.get(phase, 0.0) for row in run.rows]) for run in runs])
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
    axes.set_yticks(positions, [run.label for run in runs])
    axes.set(xlabel=FIGURES["seconds"])
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="outside upper center", ncols=len(PHASES))
    return bool(runs)


def draw_scores(runs: list[Run]) -> bool:
    """pass@1: a group of bars for each benchmark, with 95 % intervals."""
    runs = [run for run in runs if run.results]
    names = benchmarks(runs)
    axes = plt.figure(figsize=(max(4.5, 1 + 0.22 * len(names) * len(runs)), 3)).subplots()
    width = 0.8 / max(1, len(runs))
    for n, run in enumerate(runs):
        having = [i for i, name in enumerate(names) if name in run.results]
        results = [run.results[names[i]] for i in having]
        scores = np.array([result["pass@1"] for result in results])
        bounds = np.array([result["pass@1_interval"] for result in results]).T
        axes.bar(
            np.array(having) + (n - (len(runs) - 1) / 2) * width,
            100 * scores,
            width,
            yerr=(100 * np.abs(bounds - scores)).tolist(),
            label=run.label,
            color=run.color,
            hatch=run.hatch,
            edgecolor="white",
            error_kw={"ecolor": "black", "elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel=FIGURES["scores"], ylim=(0, 105))
    axes.grid(axis="x", visible=False)
    if runs:
        axes.figure.legend(loc="outside upper center", ncols=min(4, len(runs)))
    return bool(runs)


def draw_pass_at_k(runs: list[Run]) -> bool:
    """A panel for each benchmark with several answers to a problem, pass@k over k."""
    names = [
        name
        for name in benchmarks(runs)
        if any(run.results.get(name, {"samples": 1})["samples"] > 1 for run in runs)
    ]
    columns = min(3, len(names)) or 1
    lines = -(-len(names) // columns) or 1
    size = (max(4.5, 2.4 * columns), 0.7 + 2.3 * lines)
    grid = plt.figure(figsize=size).subplots(lines, columns, squeeze=False, sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        for run in runs:
            if name not in run.results:
                continue
            result = run.results[name]
            k = np.arange(1, result["samples"] + 1)
            low, high = 100 * np.array([result[f"pass@{n}_interval"] for n in k]).T
            scores = [100 * result[f"pass@{n}"] for n in k]
            axes.fill_between(k, low, high, color=run.color, alpha=0.15, linewidth=0)
            axes.plot(k, scores, color=run.color, linestyle=run.line, label=run.label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(title=name, xlabel="k", ylim=(0, 105))
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel(FIGURES["pass_at_k"])
    if names:
        shown = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
        ncols = min(4, len(shown))
        grid[0, 0].figure.legend(shown.values(), shown, loc="outside upper center", ncols=ncols)
    return bool(names)


def benchmarks(runs: list[Run]) -> list[str]:
    """In the order in which the evaluations have them."""
    return list(dict.fromkeys(name for run in runs for name in run.results))


def plot(args: Args) -> None:
    unknown = set(args.figures) - set(FIGURES)
    if unknown or not args.runs or args.window < 1:
        known = f"known figures: {', '.join(FIGURES)}"
        sys.exit(f"error: needs runs, a window of 1 or more, and {known}")
    runs = [read_run(folder, args.by) for folder in args.runs]
    if len({run.label for run in runs}) < len(runs):
        for run, folder in zip(runs, args.runs, strict=True):
            run.label = str(folder)
    for n, run in enumerate(runs):  # a run looks the same in every figure
        run.color = plt.get_cmap("viridis")(0.8 * n / max(1, len(runs) - 1))  # dark to light
        run.line, run.hatch = LINES[n % len(LINES)], HATCHES[n % len(HATCHES)]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    others = {"seconds": draw_seconds, "scores": draw_scores, "pass_at_k": draw_pass_at_k}
    for figure in args.figures:
        with plt.rc_context(STYLE):
            draw = others.get(figure, functools.partial(draw_lines, figure, args.window))
            if draw(runs):
                plt.savefig(args.output_dir / f"{figure}.png")
                print(args.output_dir / f"{figure}.png")
            plt.close()


if __name__ == "__main__":
    try:
        plot(tyro.cli(Args, description=__doc__, use_underscores=True))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
