"""Pictures: what is drawn for which run."""

from pathlib import Path

from data import write_rows
from look import plot

import numpy as np
import pytest


def write_run(folder: Path, steps: int = 12, lost: int = 0, **fields: float) -> Path:
    """A run whose metrics rise to these values, and have lost their first rows."""
    rises = [{name: v * n / steps for name, v in fields.items()} for n in range(1, steps + 1)]
    rows = [{"step": n, **row} for n, row in enumerate(rises, start=1)]
    write_rows(rows[lost:], folder / "metrics.jsonl")
    return folder


def test_every_figure_shows_the_runs_that_have_its_numbers(tmp_path):
    runs = [
        write_run(tmp_path / "sft", loss=0.3),
        write_run(tmp_path / "oswft", loss=0.2, mean_weight=0.9, pass_rate=0.5),
        write_run(tmp_path / "grpo", loss=0.01, reward=0.8),
    ]
    figures = dict(plot.draw_figures(runs, plot.FIGURES))
    legends = {name: figure.axes[0].get_legend() for name, figure in figures.items()}
    shown = {name: [text.get_text() for text in it.get_texts()] for name, it in legends.items()}
    expected = {"mean_weight": ["oswft"], "reward": ["grpo"], "pass_rate": ["oswft", "grpo"]}
    assert shown == expected | {"loss": ["sft", "oswft"]}  # GRPO's is no likelihood
    thin, thick = figures["reward"].axes[0].lines
    assert thin.get_ydata() == pytest.approx(0.8 * np.arange(1, 13) / 12)
    assert thick.get_ydata() == pytest.approx(thin.get_ydata())  # it is a straight line


def test_a_row_stands_at_its_step_where_others_are_lost(tmp_path):
    run = write_run(tmp_path / "sft", lost=4, loss=0.12)
    ((_, figure),) = plot.draw_figures([run], ["loss"])
    for line in figure.axes[0].lines:
        drawn = np.isfinite(line.get_ydata())
        assert np.array(line.get_xdata())[drawn].tolist() == [*range(5, 13)]
        assert line.get_ydata()[drawn] == pytest.approx(0.01 * np.arange(5, 13), abs=0.021)


def test_the_moving_average_is_of_the_steps_around_and_begins_and_ends_at_the_values():
    assert plot.moving_average([1, 2, 6, 12, 4, 8], reach=1) == [1, 3, 20 / 3, 22 / 3, 8, 8]
    assert plot.moving_average([1, 2, 6, 12, 4, 8], reach=9) == [1, 3, 5, 6.4, 8, 8]
    assert plot.moving_average([3], reach=2) == [3]
    gap = plot.moving_average([np.nan, 2, 6, np.nan, 4], reach=1)
    assert gap == pytest.approx([np.nan, 4, 4, np.nan, 4], nan_ok=True)
