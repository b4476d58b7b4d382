"""Pictures: what is drawn for which run, with which label, and what a damaged run gets."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from conftest import ROOT
from data import InputError
from paper import plot


def write_run(folder: Path, fields: dict, steps: int = 12, **args) -> Path:
    folder.mkdir()
    rows = [
        {"step": n + 1, "train_s": 0.5, **{k: v * (n + 1) / steps for k, v in fields.items()}}
        for n in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "args.json").write_text(json.dumps({"args": args}))
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    return [
        write_run(tmp_path / "sft", {"loss": 0.3}, model="a/Qwen3-0.6B-Base", learning_rate=1e-5),
        write_run(
            tmp_path / "oswft",
            {"loss": 0.2, "mean_weight": 0.9, "pass_rate": 0.5, "rollout_s": 1.0},
            model="a/Qwen3-4B-Base",
            learning_rate=1e-5,
        ),
        write_run(
            tmp_path / "grpo",
            {"loss": 0.01, "reward": 0.8},
            model="a/Qwen3-4B-Base",
            learning_rate=1e-6,
        ),
    ]


@pytest.fixture
def pictures(monkeypatch):
    """The figures that paper/plot.py would have closed, by name."""
    kept = {}
    save = plt.Figure.savefig

    def keep(figure, path):
        kept[path.stem] = figure
        save(figure, path)

    monkeypatch.setattr(plt.Figure, "savefig", keep)
    return kept


def legend(picture) -> list[str]:
    return [text.get_text() for text in picture.axes[0].get_legend().get_texts()]


def test_every_figure_shows_the_runs_that_have_its_numbers(runs, tmp_path, pictures):
    plot.plot(plot.Args(tuple(runs), output_dir=tmp_path / "plots"))
    scores = {"scores", "pass_at_k"}  # none of these runs was evaluated
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == set(plot.FIGURES) - scores
    assert legend(pictures["mean_weight"]) == ["oswft"]
    assert legend(pictures["reward"]) == ["grpo"]
    assert legend(pictures["pass_rate"]) == ["oswft", "grpo"]
    assert legend(pictures["loss"]) == ["sft", "oswft"]  # GRPO's is no likelihood
    bars = [tick.get_text() for tick in pictures["seconds"].axes[0].get_yticklabels()]
    assert bars == ["sft", "oswft", "grpo"]
    for name, picture in pictures.items():
        axes = picture.axes[0]
        assert axes.get_xlabel() and (axes.get_ylabel() or name == "seconds")
    thin, thick = pictures["reward"].axes[0].lines
    assert thin.get_ydata() == pytest.approx(0.8 * np.arange(1, 13) / 12)
    assert thick.get_ydata()[0] > thin.get_ydata()[0]


def write_evaluation(folder: Path, **scores: list[float]) -> Path:
    """pass@1, pass@2, ... of each benchmark, with intervals of 0.1 to both sides."""
    results = {
        name: {
            "samples": len(curve),
            **{f"pass@{k}": score for k, score in enumerate(curve, start=1)},
            **{f"pass@{k}_interval": [s - 0.1, s + 0.1] for k, s in enumerate(curve, start=1)},
        }
        for name, curve in scores.items()
    }
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_scores_have_bars_with_intervals_and_curves_over_k(runs, tmp_path, pictures):
    write_evaluation(runs[0] / "eval", aime=[0.2, 0.4], math=[0.5])
    other = write_evaluation(tmp_path / "base" / "eval", aime=[0.1, 0.3])
    plot.plot(plot.Args((runs[0], other), tmp_path / "plots", figures=("scores", "pass_at_k")))
    axes = pictures["scores"].axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["aime", "math"]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([20, 50, 10])
    ends = [segment[:, 1] for bars in axes.collections for segment in bars.get_segments()]
    assert np.array(ends) == pytest.approx(np.array([[10, 30], [40, 60], [0, 20]]))
    (panel,) = pictures["pass_at_k"].axes  # math has one answer to a problem: no curve
    assert panel.get_title() == "aime"
    assert [line.get_label() for line in panel.lines] == ["sft", "base"]
    assert [list(line.get_ydata()) for line in panel.lines] == [[20, 40], [10, 30]]
    assert list(panel.lines[0].get_xdata()) == [1, 2]


def test_benchmarks_stand_in_the_order_of_the_first_evaluation(runs, tmp_path, pictures):
    scores = {"easy": [0.9, 0.9], "middle": [0.5, 0.6], "hard": [0.1, 0.2]}
    write_evaluation(runs[0] / "eval", **scores)
    write_evaluation(runs[1] / "eval", extra=[0.3, 0.3], hard=[0.2, 0.3], easy=[0.8, 0.8])
    plot.plot(plot.Args(tuple(runs), tmp_path / "plots", figures=("scores", "pass_at_k")))
    axes = pictures["scores"].axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [*scores, "extra"]
    bars = {round(bar.get_x() + bar.get_width() / 2, 2): bar.get_height() for bar in axes.patches}
    assert bars == pytest.approx({-0.2: 90, 0.8: 50, 1.8: 10, 3.2: 30, 2.2: 20, 0.2: 80})
    panels = [panel.get_title() for panel in pictures["pass_at_k"].axes]
    assert panels[:4] == [*scores, "extra"]


def test_a_figure_that_no_run_has_is_left_out(runs, tmp_path):
    plot.plot(plot.Args((runs[0],), output_dir=tmp_path / "plots"))
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {"loss", "seconds"}


def test_runs_are_labelled_by_the_arguments_that_are_asked_for(runs, tmp_path, pictures):
    by = ("model", "learning_rate")
    plot.plot(plot.Args(tuple(runs), tmp_path / "plots", figures=("pass_rate",), by=by))
    assert legend(pictures["pass_rate"]) == ["Qwen3-4B-Base, 1e-05", "Qwen3-4B-Base, 1e-06"]


def test_lines_differ_in_style_and_in_grey(runs, tmp_path, pictures):
    plot.plot(plot.Args(tuple(runs), tmp_path / "plots", figures=("pass_rate",)))
    first, second = pictures["pass_rate"].axes[0].lines[1::2]
    assert first.get_linestyle() != second.get_linestyle()
    grey = [np.dot(line.get_color()[:3], (0.299, 0.587, 0.114)) for line in (first, second)]
    assert abs(grey[0] - grey[1]) > 0.15


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_the_moving_average_is_the_mean_of_the_steps_around(window):
    values = np.random.default_rng(0).random(17)
    for n, smooth in enumerate(plot.moving_average(values, window)):
        around = values[max(0, n - window // 2) : n - window // 2 + window]
        assert smooth == pytest.approx(around.mean())


def test_bad_input_gets_one_line(runs, tmp_path):
    damaged = write_run(tmp_path / "damaged", {"loss": 1.0})
    with (damaged / "metrics.jsonl").open("a") as out:
        out.write('{"step": 13, "lo')
    empty = write_run(tmp_path / "empty", {}, steps=0)
    for args, message in [
        ({"runs": (tmp_path / "absent",)}, "absent: holds neither metrics.jsonl nor results.json"),
        ({"runs": (damaged,)}, "damaged/metrics.jsonl:13: not JSON"),
        ({"runs": (empty,)}, "empty/metrics.jsonl: no step has been done"),
        ({"runs": (runs[0],), "by": ("size",)}, "no argument 'size'; it has model, learning_rate"),
        ({"runs": (runs[0],), "figures": ("weights",)}, "known figures: mean_weight, reward"),
        ({"runs": ()}, "needs runs"),
    ]:
        with pytest.raises(InputError, match=message) as error:
            plot.plot(plot.Args(**args, output_dir=tmp_path / "p"))
        assert "\n" not in str(error.value)
    command = [sys.executable, "-m", "paper.plot", str(damaged), "--output_dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1
    assert "damaged/metrics.jsonl:13: not JSON" in result.stderr
