"""What people look at: pictures of runs, what is drawn for which, and a training set's numbers."""

import json
import re
from pathlib import Path

from conftest import output_of, slow
from data import InputError, write_rows
from look import next_to, plot, training_set
from run import write_args
from templates import CASES, make_tokenizer

import numpy as np
import pytest
from matplotlib.figure import Figure


def write_run(folder: Path, steps: int = 12, lost: int = 0, **fields: float) -> Path:
    """A run whose metrics rise to these values, as squares do, and have lost their first rows."""
    rises = [{k: v * (n / steps) ** 2 for k, v in fields.items()} for n in range(1, steps + 1)]
    rows = [{"step": n, **row} for n, row in enumerate(rises, start=1)]
    write_rows(rows[lost:], folder / "metrics.jsonl")
    return folder


def drawn(figure: Figure) -> tuple[str, bool, dict[str, float]]:
    """The y axis, whether it is of a share, and the last value of each run."""
    [axes], runs = figure.axes, {}
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    for name, thin, thick in zip(names, axes.lines[::2], axes.lines[1::2], strict=True):
        assert (thick.get_label(), thick.get_color()) == (name, thin.get_color())
        assert thick.get_ydata() == pytest.approx(plot.moving_median(thin.get_ydata(), 5))
        runs[name] = thin.get_ydata()[-1]
    return axes.get_ylabel(), axes.get_ylim() == (0, 1), runs


def test_every_figure_shows_the_runs_that_have_its_numbers(tmp_path, monkeypatch):
    runs = (
        write_run(tmp_path / "sft", loss=0.3),
        write_run(tmp_path / "oswft", loss=0.2, mean_weight=0.9, pass_rate=0.5),
        write_run(tmp_path / "grpo", loss=0.01, reward=1.0),
    )
    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.update({path: drawn(self)}))
    plot.plot(runs, figures=tuple(plot.FIGURES))
    assert saved.keys() == {tmp_path / "plots" / f"{name}.png" for name in plot.FIGURES}
    expected = {
        "mean_weight": (True, {"oswft": 0.9}),
        "reward": (True, {"grpo": 1.0}),
        "pass_rate": (True, {"oswft": 0.5, "grpo": 1.0}),
        "loss": (False, {"sft": 0.3, "oswft": 0.2}),  # GRPO's is no likelihood
    }
    for name, figure in expected.items():
        assert saved.pop(tmp_path / "plots" / f"{name}.png") == (plot.FIGURES[name], *figure)
    plot.plot(runs)
    assert {path.stem for path in saved} == {"mean_weight", "pass_rate", "loss"}  # each curve once
    saved.clear()
    plot.plot(runs[1:], tmp_path / "elsewhere", ("reward",))
    plot.plot(runs[:1], figures=("reward", "loss"))  # it has no reward
    assert [*saved] == [tmp_path / "elsewhere/reward.png", tmp_path / "sft-plots/loss.png"]
    monkeypatch.chdir(tmp_path)  # from here paths are said as one types them
    for folders, expected in ((runs, "plots"), (runs[:1], "sft-plots")):
        assert next_to(folders, "plots") == Path(expected)
    for folders, said in ((), "folder of a run"), ((write_run(tmp_path / "new", 0),), "no step"):
        with pytest.raises(InputError, match=said):
            plot.plot(folders)


@slow
@pytest.mark.parametrize("module", ["look.plot", "look.view"])
def test_pictures_need_no_backend_of_the_notebook_that_calls(module, tmp_path, monkeypatch):
    run = write_run(tmp_path / "sft", loss=0.3)
    write_args(run, args={"model": "absent", "data": "absent"})
    monkeypatch.setenv("MPLBACKEND", "absent")  # as a notebook's is in .venv
    assert output_of("-m", module, run).strip()


def test_a_row_stands_at_its_step_where_others_are_lost(tmp_path):
    run = write_run(tmp_path / "sft", lost=4, loss=0.12)
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 13, "loss": 0.12, "mean_weight": 1}\n')  # the others have none
    ((name, figure),) = plot.draw_figures([run], [*plot.FIGURES])
    thin, thick = figure.axes[0].lines
    for line in thin, thick:
        at = np.isfinite(line.get_ydata())
        assert name == "loss" and np.array(line.get_xdata())[at].tolist() == [*range(5, 14)]
    rises = 0.12 * (np.arange(5, 13) / 12) ** 2
    assert thin.get_ydata()[4:] == pytest.approx([*rises, 0.12])


def test_the_thick_line_is_the_median_of_the_steps_around_and_leaves_no_steady_fall():
    assert plot.moving_median([1, 2, 12, 6, 4, 8], reach=1) == [1, 2, 6, 6, 6, 8]
    assert plot.moving_median([1, 2, 12, 6, 4, 8], reach=9) == [1, 2, 4, 6, 6, 8]
    falls = [0.5**n for n in range(12)]
    assert plot.moving_median(falls, reach=5) == falls
    gap = plot.moving_median([np.nan, 2, 6, np.nan, 4], reach=1)
    assert gap == pytest.approx([np.nan, 4, 4, np.nan, 4], nan_ok=True)


def test_a_training_set_is_shown_and_summed_up_with_the_tokenizer_that_is_named(
    tmp_path, capsys, process_group, monkeypatch
):
    monkeypatch.setattr("look.training_set.init_ranks", lambda _: None)  # This process has one.
    for name in ("chatml", "said"):
        make_tokenizer(CASES["chatml"]).save_pretrained(tmp_path / name)
    template = tmp_path / "said" / "chat_template.jinja"
    template.write_text("Now! " + template.read_text())
    rows = [
        {"id": str(n), "question": "q", "answer": answer, "source": source, "solution": "x" * n}
        for answer, source, n in (("B", "s", 1), ("71", "t", 13), ("72", "t", 16))
    ]
    write_rows(rows, file := tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="no report next to it names a tokenizer"):
        training_set.stats(str(file))
    report = {"arguments": {"tokenizer": str(tmp_path / "chatml")}}
    file.with_suffix(".report.json").write_text(json.dumps(report))
    longest = []
    for tokenizer in (None, str(tmp_path / "said")):
        training_set.stats(str(file), tokenizer)
        printed = capsys.readouterr()
        assert "0% of 3 solutions are right" in printed.err
        first, lengths, *counts = printed.out.split("\n\n")
        numbers = {line.split()[0]: line.split()[1:] for line in lengths.splitlines()[2:]}
        longest.append(float(numbers.pop("max")[0]))
        solutions = {name: numbers[name][1] for name in ("count", "mean", "min", "50%")}
        assert solutions == {"count": "3.0", "mean": "11.0", "min": "2.0", "50%": "14.0"}
        assert first == f"{file}: 3 examples"
        assert " ".join("".join(counts).split()) == "answer not a letter 2 B 1source t 2 s 1"
    assert longest[1] == longest[0] + len("Now! ")  # of a prompt
    training_set.show(str(file))
    border = re.findall(r"^ +(\d+) (loss|    ) ", capsys.readouterr().out, re.MULTILINE)
    start = int(border[0][0])
    assert border == [(str(start + n), "loss" if n > 3 else "    ") for n in range(6)]  # each once
    for index in (-1, 3):
        with pytest.raises(InputError, match="has rows 0 to 2"):
            training_set.show(str(file), index)
    with pytest.raises(InputError, match="is no list of suspects"):
        training_set.suspect(str(file))
