"""Weighing before training: static weights, own answers and suspect references."""

from dataclasses import replace
from pathlib import Path

from conftest import launch, needs_vllm, slow
from data import InputError, derive_seed, read_rows, write_rows
from look.training_set import suspect
from prepare import weigh
from stand_in import TOKENIZER, Scripted, grade_here

import numpy as np
import pytest

SHORT = {"max_length": 160, "max_completion_length": 128, "precision": "fp32"}
SHORT |= {"verifier_workers": 1}


def test_answers_agree_if_the_verifier_calls_them_equal():
    score = grade_here(1).score
    extracted = [
        ["1/2", "0.5", r"\\frac{1}{2}", "7"],  # three of four
        ["B", "B", "C", "B"],
        ["B", "B", "A", "A"],  # two of four
        ["7", "7", "7", None],
        ["2", "2", "2", "7"],  # the right one
        ["8", "9", "7", "0.70e1"],
    ]
    right = np.zeros((6, 4), dtype=bool)
    right[4, :3] = right[1, 2] = True
    found = weigh.agreed_answers(extracted, right, score, 0.75)
    assert found == [("1/2", 3), ("B", 3), None, ("7", 3), None, None]
    half = weigh.agreed_answers(extracted, right, score, 0.5)
    assert half[2] == ("B", 2) and half[4] is None
    for answers, agreed in ((["7"], None), (["7", "7"], ("7", 2))):  # at least two
        none_right = np.zeros((1, len(answers)))
        assert weigh.agreed_answers([answers], none_right, score, 0.75) == [agreed]


def box(*answers: int) -> list[str]:
    return [rf"1=1;\boxed{{{answer}}}" for answer in answers]


TEXTS = {  # four answers to each question; one begins with a special token, one is cut off
    "1+0": box(1, 1, 1, 7),
    "1+1": [r"<|im_start|>\boxed{2}", r"\boxed{2}…", *box(2, 5), *box(2, 2)],
    "1+2": box(9, 9, 4, 9, 9, 9),
    "1+3": box(8, 8, 8, 8, 8, 8),
}


class Weighing:
    """A weighing in this process, of four rows whose answers are written by hand."""

    def __init__(self, tiny: Path, folder: Path, patch: pytest.MonkeyPatch):
        self.patch, self.asked, self.folder = patch, [], folder
        patch.setattr(weigh, "init_ranks", lambda *_, **__: None)
        patch.setattr("cpu.available_memory", lambda: 2**34)
        for name in ("evaluate.verify.Verifier", "prepare.weigh.Verifier"):
            patch.setattr(name, grade_here)
        self.rows = [
            {"id": f"row {n}", "question": f"1+{n}", "solution": f"1+{n}={n + 1}"}
            | {"answer": f"{n + 1}", "source": "math500", "spoiled": False, "pass_rate": "old"}
            for n in range(4)
        ]
        paths = {"model": str(tiny / "model"), "data": str(folder / "train.jsonl")}
        self.args = weigh.Args(**paths, output=folder / "weighted.jsonl", **SHORT, num_rollouts=4)

    def write(self, **changes) -> list[dict]:
        """Weigh the rows; returns what is written. `asked` has the questions that were sampled."""
        write_rows(self.rows, self.args.data)
        self.vllm = Scripted(TEXTS)
        self.patch.setattr("rollout.import_vllm", lambda: self.vllm)
        assert weigh.weigh(replace(self.args, **changes)) == 0
        prompts = [prompt for prompt, params in self.vllm.requests if params["logprobs"] is None]
        self.asked = [TOKENIZER.decode(prompt).split("\n")[1] for prompt in prompts]
        return [row for _, row in read_rows(str(self.args.output))]

    @property
    def suspects(self) -> list[dict]:
        path = self.args.output.with_suffix(".suspects.jsonl")
        return [row for _, row in read_rows(str(path))] if path.read_text() else []


@pytest.fixture
def made(tiny, tmp_path, one_rank, monkeypatch) -> Weighing:
    return Weighing(tiny, tmp_path, monkeypatch)


def test_weights_are_1_less_the_pass_rate_in_the_order_of_the_rows(made, capsys):
    rows = made.write()
    assert made.asked == [*TEXTS] * 4
    assert [row["weight"] for row in rows] == [0.25, 0.25, 1.0, 1.0]
    said = {"pass_rate": [0.75, 0.75, 0.0, 0.0], "answers": [4] * 4}
    for n, (row, before) in enumerate(zip(rows, made.rows, strict=True)):
        own = {name: values[n] for name, values in said.items()}
        assert row == before | {"weight": row["weight"]} | own
    shown = capsys.readouterr()
    assert "never solved: 2 rows" in shown.out and "own columns pass_rate are rep" in shown.err
    assert shown.out.splitlines()[3].split() == ["between", "2", "12", "50.0%"]
    assert "weight of an average token: 0.625" in shown.out
    written, suspects = made.args.output.read_bytes(), made.suspects
    made.write()
    assert (made.args.output.read_bytes(), made.suspects) == (written, suspects)
    assert not made.asked


def test_the_answers_are_sampled_as_in_training(made):
    made.write(seed=3, temperature=0.7, max_completion_length=100, vllm_memory=0.5)
    requests = made.vllm.requests[1:]  # after the comparison with transformers
    told = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "n": 1, "max_tokens": 100}
    assert all(told.items() <= params.items() for _, params in requests)
    assert [params["seed"] for _, params in requests] == [
        derive_seed(3, "training set", f"row {n}", k) for k in range(4) for n in range(4)
    ]
    assert made.vllm.options["dtype"] == "float32" and made.vllm.options["load_format"] == "auto"


def test_verdicts_are_those_of_now(made):
    made.write()
    made.rows[3]["answer"] = "8"  # a wrong reference is corrected
    assert [row["weight"] for row in made.write()] == [0.25, 0.25, 1.0, 0.0]
    made.rows[0]["source"] = "a"
    judge, own_source = made.folder / "judge.py", "1 if example.source == 'a' else 0"
    for code, weights in ((own_source, [0, 1, 1, 1]), ("1 / 4", [0.75] * 4)):
        judge.write_text(f"def reward(completion, example):\n    return {code}\n")
        rows = made.write(reward=f"{judge}:reward", own_answers=True)
        assert [row["weight"] for row in rows] == weights and not made.suspects
    # A part of the points makes no answer right: no solution is replaced by it.
    assert [row["solution"] for row in rows] == ["1+0=1", "1+1=2", "1+2=3", "1+3=4"]
    assert not made.asked


def test_suspects_are_listed_the_most_agreed_first_and_may_be_dropped(made, capsys):
    assert len(made.write()) == 4
    found = [(s["id"], s["agreed"], s["agreeing"]) for s in made.suspects]
    assert found == [("row 3", "8", 4), ("row 2", "9", 3)]
    listed = str(made.args.output.with_suffix(".suspects.jsonl"))
    suspect(listed, index=1)
    shown = capsys.readouterr().out
    assert "the reference: 3\n1+2=3" in shown and f"3 of 4 answers: 9\n{TEXTS['1+2'][0]}" in shown
    assert [row["id"] for row in made.write(suspects="drop")] == ["row 0", "row 1"]
    assert len(made.write(suspects="drop", agreement=0.8)) == 3
    assert [row["id"] for row in made.write(never_solved="drop")] == ["row 0", "row 1"]


def test_own_answers_leave_out_those_that_cannot_be_trained_on(made):
    own = [row["solution"] for row in made.write(own_answers=True)]
    assert own == [TEXTS["1+0"][0], TEXTS["1+1"][2], "1+2=3", "1+3=4"]


def test_more_answers_are_sampled_fewer_are_read_and_an_edited_question_is_answered_anew(made):
    made.write()
    del made.rows[0]
    assert [row["answers"] for row in made.write(num_rollouts=6)] == [6] * 3
    assert made.asked == ["1+1", "1+2", "1+3"] * 2
    made.rows[0] |= {"question": "1+3", "answer": "8"}
    assert [row["weight"] for row in made.write(num_rollouts=2)] == [0.0, 1.0, 1.0]
    assert made.asked == ["1+3"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "another temperature"),
        ({"num_rollouts": 1, "suspects": "drop"}, "num_rollouts of 2"),
        ({"max_length": 129}, "no row is left"),
    ],
)
def test_bad_input_is_refused(made, changes, message):
    made.write()
    with pytest.raises(InputError, match=message):
        made.write(**changes)


@slow
@needs_vllm
def test_a_set_is_weighed_over_two_ranks_by_each_rows_own_answers(tiny, tmp_path):
    data, output = tmp_path / "train.jsonl", tmp_path / "weighted.jsonl"
    rows = [row for _, row in read_rows(str(tiny / "train.jsonl"))][:200]
    write_rows(rows, data)
    call = ["--model", tiny / "model", "--data", data, "--output", output]
    call += [x for name, value in SHORT.items() for x in (f"--{name}", value)]
    launch("--module", "prepare.weigh", *call, ranks=2)
    weighed = [row for _, row in read_rows(str(output))]
    assert [row["id"] for row in weighed] == [row["id"] for row in rows]
    assert np.mean([row["pass_rate"] for row in weighed]) > 0.5  # by another's hardly any is right
