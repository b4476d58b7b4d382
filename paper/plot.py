"""Pictures of training runs and of evaluations, one or several of them, as PNG.

    python -m paper.plot runs/sft runs/oswft runs/grpo                  # all figures, to runs/plots
    python -m paper.plot runs/*/eval                                    # scores alone
    python -m paper.plot runs/*-oswft --figures mean_weight --by model  # the paper's Figure 1
    python -m paper.plot runs/*-grpo --figures reward --by model learning_rate    # its Figure 2

Training is read from a run's metrics.jsonl: a thin line is what was measured, the thick one its
moving average. Scores are read from results.json of an evaluation, or of eval/ in a run; they come
with 95 % intervals. A figure shows the runs that have its numbers, and is left out if none has.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.figure import Figure

from data import InputError, parse_row, read_rows
from paper import label, printable

FIGURES = {  # name -> what the y axis shows
    "mean_weight": "mean weight 1 − p̂",
    "reward": "mean reward (share of answers right)",
    "pass_rate": "pass rate p̂ (share right)",
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
    "text.parse_math": False,  # a run's name may hold dollars
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

    def check(self) -> None:
        """Raise InputError for what cannot work, before anything is read."""
        if set(self.figures) - set(FIGURES) or not self.runs or self.window < 1:
            known = f"known figures: {', '.join(FIGURES)}"
            raise InputError(f"needs runs, a window of 1 or more, and {known}")


@dataclass
class PlottedRun:
    label: str
    rows: list[dict]  # of metrics.jsonl, one for each step; none for an evaluation
    results: dict[str, dict]  # by benchmark; none if it was not evaluated
    color: tuple = ()
    line: str | tuple = "-"
    hatch: str = ""

    def series(self, figure: str) -> np.ndarray | None:
        """The numbers of a line figure, one for each step; None if the run has none."""
        first = self.rows[0] if self.rows else {}
        if figure == "loss" and "reward" in first:
            return None  # GRPO's is a surrogate about 0: no likelihood of anything
        key = "reward" if figure == "pass_rate" and "reward" in first else figure
        return np.array([row[key] for row in self.rows]) if key in first else None

    def curves(self) -> dict[str, dict]:
        """The results of the benchmarks with several answers to a problem."""
        return {name: result for name, result in self.results.items() if result["samples"] > 1}

    def has(self, figure: str) -> bool:
        """Whether the figure shows this run."""
        others = {"seconds": self.rows, "scores": self.results, "pass_at_k": self.curves()}
        return bool(others[figure]) if figure in others else self.series(figure) is not None


def read_run(folder: Path, by: Sequence[str]) -> PlottedRun:
    """Raises InputError if the folder holds neither a run nor an evaluation, or a damaged one."""
    metrics, results = folder / "metrics.jsonl", folder / "results.json"
    if not results.exists():
        results = folder / "eval" / "results.json"
    if not metrics.exists() and not results.exists():
        raise InputError(f"{folder}: holds neither metrics.jsonl nor results.json")
    rows = [row for _, row in read_rows(str(metrics))] if metrics.exists() else []
    if metrics.exists() and not rows:
        raise InputError(f"{metrics}: no step has been done")
    scores = read_json(results) if results.exists() else {}
    if not all("pass@1" in result for result in scores.values()):
        raise InputError(f"{results}: not written by evaluate.py")
    args = read_json((metrics if rows else results).with_name("args.json"))["args"] if by else {}
    for name in by:
        if name not in args:
            raise InputError(f"{folder}: has no argument '{name}'; it has {', '.join(args)}")
    values = ", ".join(Path(str(args[name])).name for name in by)
    return PlottedRun(values or label(folder), rows, scores)


def read_runs(folders: Sequence[Path], by: Sequence[str] = ()) -> list[PlottedRun]:
    """Runs, each with a label and a look of its own. Raises InputError like `read_run`."""
    runs = [read_run(folder, by) for folder in folders]
    if len({run.label for run in runs}) < len(runs):
        for run, folder in zip(runs, folders, strict=True):
            run.label = printable(str(folder))
    for n, run in enumerate(runs):  # a run looks the same in every figure
        run.color = plt.get_cmap("viridis")(0.8 * n / max(1, len(runs) - 1))  # dark to light
        run.line, run.hatch = LINES[n % len(LINES)], HATCHES[n % len(HATCHES)]
    return runs


def read_json(path: Path) -> dict:
    return parse_row(path.read_bytes(), str(path))


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the `window` steps around each step, over fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    steps = np.arange(len(values))
    start = np.maximum(0, steps - window // 2)
    end = np.minimum(len(values), steps - window // 2 + window)
    return (sums[end] - sums[start]) / (end - start)


# ------------------------------------------------------------------------------------------------
# The figures; each is given the runs that have its numbers, at least one


def draw_lines(figure: str, runs: Sequence[PlottedRun], window: int) -> None:
    """A value over the optimizer steps: a thin line and its moving average for each run."""
    axes = plt.figure().subplots()
    for run in runs:
        steps, values = [row["step"] for row in run.rows], run.series(figure)
        axes.plot(steps, values, color=run.color, alpha=0.25, linewidth=0.7)
        smooth = moving_average(values, window)
        axes.plot(steps, smooth, color=run.color, linestyle=run.line, label=run.label)
    axes.set(xlabel="optimizer step", ylabel=FIGURES[figure])
    axes.set_ylim(0, None if figure == "loss" else 1)
    axes.locator_params(axis="x", integer=True)
    axes.legend()


def draw_seconds(runs: Sequence[PlottedRun]) -> None:
    """A bar for each run, its phases side by side."""
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


def draw_scores(runs: Sequence[PlottedRun]) -> None:
    """pass@1: a group of bars for each benchmark, with 95 % intervals."""
    names = in_order(run.results for run in runs)
    axes = plt.figure(figsize=(max(4.5, 1 + 0.22 * len(names) * len(runs)), 3)).subplots()
    width = 0.8 / len(runs)
    for n, run in enumerate(runs):
        places = np.array([names.index(name) for name in run.results])
        scores = np.array([result["pass@1"] for result in run.results.values()])
        bounds = np.array([result["pass@1_interval"] for result in run.results.values()]).T
        axes.bar(
            places + (n - (len(runs) - 1) / 2) * width,
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
    axes.figure.legend(loc="outside upper center", ncols=min(4, len(runs)))


def draw_pass_at_k(runs: Sequence[PlottedRun]) -> None:
    """A panel for each benchmark with several answers to a problem, pass@k over k."""
    names = in_order(run.curves() for run in runs)
    width = min(3, len(names))  # in panels
    height = -(-len(names) // width)
    figure = plt.figure(figsize=(max(4.5, 2.4 * width), 0.7 + 2.3 * height))
    panels = figure.subplots(height, width, squeeze=False, sharey=True)
    shown = {}  # label -> one of its lines, for the legend
    for axes, name in zip(panels.flat, names, strict=False):
        for run in runs:
            if name not in run.curves():
                continue
            result = run.results[name]
            k = np.arange(1, result["samples"] + 1)
            low, high = 100 * np.array([result[f"pass@{n}_interval"] for n in k]).T
            scores = [100 * result[f"pass@{n}"] for n in k]
            axes.fill_between(k, low, high, color=run.color, alpha=0.15, linewidth=0)
            (shown[run.label],) = axes.plot(
                k, scores, color=run.color, linestyle=run.line, label=run.label
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(title=name, xlabel="k", ylim=(0, 105))
    for axes in panels.flat[len(names) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel(FIGURES["pass_at_k"])
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=min(4, len(shown)))


def in_order(evaluations: Iterable[dict]) -> list[str]:
    """The benchmarks of all evaluations, in the order in which they were asked for."""
    return list(dict.fromkeys(name for results in evaluations for name in results))


def draw_figures(
    runs: Sequence[PlottedRun], figures: Sequence[str], window: int
) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of those that have something to show."""
    plt.switch_backend("Agg")  # files, no window
    draw = {"seconds": draw_seconds, "scores": draw_scores, "pass_at_k": draw_pass_at_k}
    for name in figures:
        having = [run for run in runs if run.has(name)]
        if not having:
            continue
        with plt.rc_context(STYLE):
            if name in draw:
                draw[name](having)
            else:
                draw_lines(name, having, window)
            yield name, plt.gcf()
            plt.close()


def plot(args: Args) -> None:
    """Write the figures that have something to show. Raises InputError."""
    args.check()
    runs = read_runs(args.runs, args.by)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, figure in draw_figures(runs, args.figures, args.window):
        figure.savefig(args.output_dir / f"{name}.png")
        print(args.output_dir / f"{name}.png")


if __name__ == "__main__":
    try:
        plot(tyro.cli(Args, description=__doc__, use_underscores=True))
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
