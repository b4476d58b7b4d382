"""Pictures of runs: what is drawn for which."""

from pathlib import Path

from data import write_rows
from look import plot

import numpy as np
import pytest
from matplotlib.figure import Figure


def write_run(folder: Path, *steps: int, **fields: float) -> Path:
    """A run whose metrics rise to these values at the last of its steps; other rows are lost."""
    rows = [{"step": n, **{k: v * n / max(steps) for k, v in fields.items()}} for n in steps]
    write_rows(rows, folder / "metrics.jsonl")
    return folder


def drawn(figure: Figure) -> tuple[str, bool, dict[str, float]]:
    """The y axis, whether it is of a share, and the last value of each run."""
    [axes], runs = figure.axes, {}
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    for name, thin, thick in zip(names, axes.lines[::2], axes.lines[1::2], strict=True):
        runs[name] = thin.get_ydata()[-1]
        smooth = plot.moving_median(thin.get_ydata(), 5)
        assert thick.get_label() == name and thick.get_ydata()[2] == smooth[2] > thin.get_ydata()[2]
        for line in thin, thick:
            at = np.isfinite(line.get_ydata())
            assert np.array(line.get_xdata())[at].tolist() == [3, 5]
    return axes.get_ylabel(), axes.get_ylim() == (0, 1), runs


def test_every_figure_shows_the_runs_that_have_its_numbers(tmp_path, monkeypatch):
    runs = (
        write_run(tmp_path / "sft", 3, 5, loss=0.3),
        write_run(tmp_path / "oswft", 3, 5, loss=0.2, mean_weight=0.9, pass_rate=0.5),
        write_run(tmp_path / "grpo", 3, 5, loss=0.01, reward=1.0),
    )
    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.update({path: drawn(self)}))
    plot.plot(runs, figures=tuple(plot.FIGURES))
    expected = {
        "mean_weight": (True, {"oswft": 0.9}),
        "reward": (True, {"grpo": 1.0}),
        "pass_rate": (True, {"oswft": 0.5, "grpo": 1.0}),
        "loss": (False, {"sft": 0.3, "oswft": 0.2}),  # GRPO's is no likelihood
    }
    assert saved == {
        tmp_path / "plots" / f"{name}.png": (plot.FIGURES[name], *figure)
        for name, figure in expected.items()
    }
    saved.clear()
    plot.plot(runs)
    assert {path.stem for path in saved} == {"mean_weight", "pass_rate", "loss"}  # each curve once
    saved.clear()
    plot.plot(runs[1:], tmp_path / "elsewhere", ("reward",))
    plot.plot(runs[:1], figures=("reward", "loss"))  # it has no reward
    assert [*saved] == [tmp_path / "elsewhere/reward.png", tmp_path / "sft-plots/loss.png"]


def test_the_thick_line_is_the_median_of_the_steps_around_and_leaves_no_steady_fall():
    assert plot.moving_median([1, 2, 12, 6, 4, 8], reach=1) == [1, 2, 6, 6, 6, 8]
    assert plot.moving_median([1, 2, 12, 6, 4, 8], reach=9) == [1, 2, 4, 6, 6, 8]
    falls = [0.5**n for n in range(12)]
    assert plot.moving_median(falls, reach=5) == falls
    gap = plot.moving_median([np.nan, 2, 6, np.nan, 4], reach=1)
    assert gap == pytest.approx([np.nan, 4, 4, np.nan, 4], nan_ok=True)
