"""Pictures: what is drawn for which run, where they go, and what a damaged run gets."""

import json
from pathlib import Path

from conftest import run_alone, slow
from data import write_rows
from paper import plot

import matplotlib.pyplot as plt
import numpy as np
import pytest


def write_run(folder: Path, steps: int = 12, **fields: float) -> Path:
    """A run whose metrics rise to these values."""
    rises = [{name: v * n / steps for name, v in fields.items()} for n in range(1, steps + 1)]
    write_rows([{"train_s": 0.5, **row} for row in rises], folder / "metrics.jsonl")
    return folder


def write_evaluation(folder: Path, **scores: list[float]) -> Path:
    """pass@1, pass@2, ... of each benchmark, with intervals of 0.1 to both sides."""
    results = {name: {"samples": len(curve)} for name, curve in scores.items()}
    for name, curve in scores.items():
        for k, score in enumerate(curve, start=1):
            bounds = [score - 0.1, score + 0.1]
            results[name] |= {f"pass@{k}": score, f"pass@{k}_interval": bounds}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    return [
        write_run(tmp_path / "sft", loss=0.3),
        write_run(tmp_path / "oswft", loss=0.2, mean_weight=0.9, pass_rate=0.5, rollout_s=1.0),
        write_run(tmp_path / "grpo", loss=0.01, reward=0.8),
    ]


def draw(runs: list[Path], name: str) -> plt.Figure:
    return next(figure for _, figure in plot.draw_figures(plot.read_runs(runs), [name]))


def test_every_figure_shows_the_runs_that_have_its_numbers(runs):
    shown = {}
    for name, figure in plot.draw_figures(plot.read_runs(runs), plot.FIGURES):
        if name in plot.LINES:
            shown[name] = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert shown == {
        "mean_weight": ["oswft"],
        "reward": ["grpo"],
        "pass_rate": ["oswft", "grpo"],
        "loss": ["sft", "oswft"],  # GRPO's is no likelihood
    }
    thin, thick = draw(runs, "reward").axes[0].lines
    assert thin.get_ydata() == pytest.approx(0.8 * np.arange(1, 13) / 12)
    assert thick.get_ydata()[0] > thin.get_ydata()[0]


def test_scores_have_intervals_and_benchmarks_stand_in_the_order_of_the_first_evaluation(runs):
    write_evaluation(runs[0] / "eval", aime=[0.2, 0.4], math=[0.5])
    other = write_evaluation(runs[0].parent / "base" / "eval", own=[0.3, 0.3], aime=[0.1, 0.3])
    axes = draw([runs[0], other], "scores").axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["aime", "math", "own"]
    bars = {round(bar.get_x() + bar.get_width() / 2, 1): bar.get_height() for bar in axes.patches}
    assert bars == pytest.approx({-0.2: 20, 0.8: 50, 2.2: 30, 0.2: 10})
    ends = [segment[:, 1] for lines in axes.collections for segment in lines.get_segments()]
    assert np.array(ends) == pytest.approx(np.array([[10, 30], [40, 60], [20, 40], [0, 20]]))
    panels = draw([runs[0], other], "pass_at_k").axes  # math has one answer to a problem: no curve
    assert [panel.get_title() for panel in panels] == ["aime", "own"]
    assert [list(line.get_ydata()) for line in panels[0].lines] == [[20, 40], [10, 30]]


def test_pictures_go_into_the_runs_folder_or_next_to_several_runs(runs, tmp_path):
    plot.plot((runs[0],))
    assert {path.stem for path in (runs[0] / "plots").iterdir()} == {"loss", "seconds"}
    plot.plot(tuple(runs), figures=("reward",))
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["reward.png"]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_moving_average_is_the_mean_of_the_steps_around(window):
    values = np.random.default_rng(0).random(17)
    for n, smooth in enumerate(plot.moving_average(values, window)):
        around = values[max(0, n - window // 2) : n - window // 2 + window]
        assert smooth == pytest.approx(around.mean())


@slow
def test_a_damaged_run_gets_one_line(runs):
    with (runs[0] / "metrics.jsonl").open("a") as out:
        out.write('{"step": 13, "lo')
    result = run_alone("-m", "paper.plot", runs[0])
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "sft/metrics.jsonl:13: not JSON" in result.stderr
