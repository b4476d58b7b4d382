"""docs/lesson.ipynb: every cell runs, and what is committed is what the cells show."""

import contextlib
import io
import json
import re

from conftest import ROOT, slow

import matplotlib.pyplot as plt
import pytest
import torch

NOTEBOOK = ROOT / "docs" / "lesson.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def without_numbers(text: str) -> str:
    return re.sub(r"\s*-?\d[\d.]*", " #", text)


# What of a cell's text must be as it is committed; else all but its numbers
COMPARED = dict.fromkeys(("base", "answer-4", "adam-steps", "pairs", "fair"), str)  # of no model
SAMPLED = ("rollout", "logprobs", "coefficients", "own-weights")
COMPARED |= dict.fromkeys(SAMPLED, bool)  # is there any


@pytest.fixture(scope="module")
def lesson(tiny) -> tuple[dict[str, tuple[str, int]], dict]:
    """Runs every cell in order: its text and number of pictures by its id; the variables."""
    shown, variables = {}, {}
    with pytest.MonkeyPatch.context() as patch, plt.rc_context():
        patch.chdir(NOTEBOOK.parent)
        patch.setattr(plt, "show", lambda: None)  # figures are counted
        patch.setattr(plt, "savefig", lambda file, dpi: None)
        plt.switch_backend("Agg")
        plt.close("all")  # those of other tests
        for cell in CELLS:
            source = "".join(cell["source"]).replace('Path("runs/tiny")', f"Path({str(tiny)!r})")
            source = source.replace("STEPS = 12", "STEPS = 1")
            source = re.sub(r"(load_heldout\(\*[A-Z]+\))", r"\1[::4]", source)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, f"cell '{cell['id']}'", "exec"), variables)
            shown[cell["id"]] = printed.getvalue(), len(plt.get_fignums())
            plt.close("all")
    assert (variables["BASE"], variables["STEPS"]) == (tiny, 1)
    return shown, variables


@slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["id"])
def test_a_cells_committed_output_is_what_it_shows(cell, lesson):
    text, num_pictures = lesson[0][cell["id"]]
    committed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    compared = COMPARED.get(cell["id"], without_numbers)
    assert compared(text) == compared(committed)
    assert num_pictures == sum("data" in output for output in cell["outputs"])


@slow
def test_weights_that_a_reader_hands_over_or_defines_anew_are_learnt_by(lesson):
    _, variables = lesson
    train, ones = variables["train"], lambda rewards: torch.ones(len(rewards))
    (sft,), (unedited,) = train("sft")[0], train("oswft")[0]
    assert unedited < sft and train("oswft", ones)[0] == pytest.approx([sft])
    variables["oswft_weights"] = ones  # as in a cell of one's own
    assert train("oswft")[0] == pytest.approx([sft])


def test_what_is_committed_was_run_in_order_and_names_no_machine():
    assert [cell["execution_count"] for cell in CELLS] == [*range(1, len(CELLS) + 1)]
    kinds = {output["output_type"] for cell in CELLS for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}  # no error
    assert not re.search(r"/(home|Users|root|work|tmp|usr)/", NOTEBOOK.read_text())
