"""Weighing before training: static weights, own answers and suspect references."""

import json
from dataclasses import replace
from pathlib import Path

from conftest import launch, needs_vllm, slow
from data import Example, InputError, load_examples, read_rows, write_rows
from demo.tiny import spoil_file
from look.training_set import suspect
from models import load_tokenizer
from prepare import weigh
from verify import Verifier

import numpy as np
import pytest

SHORT = {"max_length": 160, "max_completion_length": 128, "precision": "fp32"}
SHORT |= {"verifier_workers": 1}


def test_answers_agree_if_the_verifier_calls_them_equal():
    extracted = [
        ["1/2", "0.5", r"\\frac{1}{2}", "7"],  # three of four
        ["B", "B", "C", "B"],
        ["B", "B", "A", "A"],  # two of four
        ["7", "7", "7", None],
        ["7", None, None, None],
        ["2", "2", "2", "7"],  # the right one
        ["8", "9", "7", "0.70e1"],
    ]
    right = np.zeros((7, 4), dtype=bool)
    right[5, :3] = right[1, 2] = True
    for answers, agreed in ((["7"], None), (["7", "7"], ("7", 2))):  # at least two
        right_alone = np.zeros((1, len(answers)))
        assert weigh.agreed_answers([answers], right_alone, lambda *_: [], 0.75) == [agreed]
    with Verifier(2) as verifier:
        found = weigh.agreed_answers(extracted, right, verifier.score, 0.75)
        half = weigh.agreed_answers(extracted, right, verifier.score, 0.5)
    assert found == [("1/2", 3), ("B", 3), None, ("7", 3), None, None, None]
    assert half[2] == ("B", 2) and half[5] is None


class Pass:
    """A pass whose answers are written by hand."""

    def __init__(self, tiny: Path, folder: Path):
        self.tokenizer = load_tokenizer(str(tiny / "model"))
        self.data, self.output = folder / "train.jsonl", folder / "weighted.jsonl"
        rows = [
            {"id": name, "question": f"1+{n}", "solution": f"1+{n}={n + 1}", "answer": str(n + 1)}
            for n, name in enumerate(["first", "second", "third", "fourth"])
        ]
        own = {"source": "easy", "spoiled": False, "pass_rate": "of another model"}
        write_rows([{**row, **own} for row in rows], self.data)
        paths = {"model": str(tiny / "model"), "data": str(self.data), "output": self.output}
        self.args = weigh.Args(**paths, **SHORT, num_rollouts=4)
        self.folder = folder / "weighted.answers"

    def missing(self, **changes) -> list:
        args = replace(self.args, **changes)
        sampling = weigh.sampling_args(args)
        rows = weigh.load_rows(args, self.tokenizer)
        problems = [weigh.as_problem(row.example) for row in rows]
        return weigh.find_missing(sampling, self.folder, self.tokenizer, problems)

    def answer(self, *answers: str, number: int = 0) -> None:
        """Answer what is missing: for each row a text with its K answers, "2 2 3 !2"."""
        by_row = dict(zip(["first", "second", "third", "fourth"], answers, strict=True))
        rows = []
        for problem, n in self.missing():
            said = by_row[problem.id].split()[n]
            text = f"it is \\boxed{{{said.strip('!')}}}" + "<|im_end|>" * said.startswith("!")
            row = {"benchmark": problem.source, "id": problem.id, "sample": n, "text": text}
            row |= {"correct": said.strip("!") == problem.answer, "extracted": said.strip("!")}
            rows.append({**row, "finish_reason": "stop", "tokens": 9})
        write_rows(rows, self.folder / f"samples.rank0.{number}.jsonl")

    def write(self, **changes) -> list[dict]:
        args = replace(self.args, **changes)
        rows = weigh.load_rows(args, self.tokenizer)
        weigh.write_set(args, self.folder, self.tokenizer, rows)
        return [row for _, row in read_rows(str(self.output))]

    @property
    def suspects(self) -> list[dict]:
        return [json.loads(line) for line in open(self.output.with_suffix(".suspects.jsonl"))]


@pytest.fixture
def made(tiny, tmp_path) -> Pass:
    found = Pass(tiny, tmp_path)
    found.answer("1 1 1 7", "!2 !2 2 5", "9 9 4 9", "8 8 8 8")
    return found


def test_weights_are_1_less_the_pass_rate_in_the_order_of_the_rows(made, capsys):
    rows = made.write()
    assert [row["id"] for row in rows] == ["first", "second", "third", "fourth"]
    assert [row["weight"] for row in rows] == [0.25, 0.25, 1.0, 1.0]
    assert [row["pass_rate"] for row in rows] == [0.75, 0.75, 0.0, 0.0]
    assert all(row["answers"] == 4 and row["spoiled"] is False for row in rows)
    before = load_examples(made.args.data)
    assert [e.solution for e in load_examples(str(made.output))] == [e.solution for e in before]
    said = capsys.readouterr()
    assert "never solved: 2 rows" in said.out and "own columns pass_rate are replaced" in said.err
    written, suspects = made.output.read_bytes(), made.suspects
    made.write()
    assert (made.output.read_bytes(), made.suspects) == (written, suspects)


def test_answers_that_another_judge_has_graded_are_weighed_by_their_new_verdicts(made, capsys):
    path = made.folder / "samples.rank0.0.jsonl"
    path.write_text(path.read_text().replace('"correct": true', '"correct": false'))
    assert not made.missing()  # nothing is sampled
    assert "16 answers are graded anew" in capsys.readouterr().err
    assert [row["weight"] for row in made.write()] == [0.25, 0.25, 1.0, 1.0]


def test_suspects_are_listed_the_most_agreed_first_and_may_be_dropped(made, capsys):
    assert len(made.write()) == 4
    found = [(s["id"], s["agreed"], s["agreeing"]) for s in made.suspects]
    assert found == [("fourth", "8", 4), ("third", "9", 3)]
    assert made.suspects[1]["completion"] == "it is \\boxed{9}"
    suspect(str(made.output.with_suffix(".suspects.jsonl")), index=1)
    shown = capsys.readouterr().out
    assert "the reference: 3\n1+2=3" in shown and "3 of 4 answers: 9" in shown
    with pytest.raises(InputError, match="has 2 rows"):
        suspect(str(made.output.with_suffix(".suspects.jsonl")), index=2)
    assert [row["id"] for row in made.write(suspects="drop")] == ["first", "second"]
    assert len(made.write(suspects="drop", agreement=0.8)) == 3
    assert [row["id"] for row in made.write(never_solved="drop")] == ["first", "second"]


def test_own_answers_leave_out_those_that_cannot_be_trained_on(made):
    own = [row["solution"] for row in made.write(own_answers=True)]
    assert own == ["it is \\boxed{1}", "it is \\boxed{2}", "1+2=3", "1+3=4"]


def test_a_row_that_was_edited_since_is_answered_anew(made, tmp_path, capsys):
    assert made.missing() == []
    text = made.data.read_text()
    made.data.write_text(text.replace('"answer": "4"', '"answer": "8"'))
    assert [(problem.id, n) for problem, n in made.missing()] == [("fourth", n) for n in range(4)]
    assert "1 rows are gone or have changed" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"train\.jsonl:4: .* has 0 of its answers"):
        made.write()
    made.answer("", "", "", "8 8 8 8", number=1)
    assert [row["weight"] for row in made.write()] == [0.25, 0.25, 1.0, 0.0]
    made.data.write_text("".join(line.replace("1+", "5+") + "\n" for line in text.splitlines()))
    with pytest.raises(InputError, match="answers to other data"):
        made.missing()


def test_more_answers_are_sampled_and_fewer_are_read(made):
    assert len(made.missing(num_rollouts=6)) == 8
    assert [row["weight"] for row in made.write(num_rollouts=2)] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "another temperature"),
        ({"num_rollouts": 1, "suspects": "drop"}, "num_rollouts of 2"),
        ({"max_length": 129}, "no row is left"),
    ],
)
def test_bad_input_is_refused(made, changes, message):
    with pytest.raises(InputError, match=message):
        made.missing(**changes)


def test_a_column_that_cannot_be_written_is_refused_before_sampling(made, monkeypatch):
    picture = Example("1", "1+1", "2", "2", "s", {"image": object()}, "rows:1")  # of the hub
    monkeypatch.setattr(weigh, "load_examples", lambda _: [picture])
    with pytest.raises(InputError, match="rows:1: a column cannot be written"):
        made.missing()


@slow
@needs_vllm
def test_a_set_is_weighed_over_two_ranks_and_most_suspects_are_wrong_keys(tiny, tmp_path):
    base, output = tmp_path / "base", tmp_path / "weighted.jsonl"
    base.mkdir()
    rows = [row for _, row in read_rows(str(tiny / "train.jsonl"))][:400]
    write_rows(rows, base / "train.jsonl")
    spoil_file(base)
    call = ["--model", tiny / "model", "--data", base / "train-wrong.jsonl", "--output", output]
    call += [x for name, value in SHORT.items() for x in (f"--{name}", value)]
    launch("--module", "prepare.weigh", *call, ranks=2)
    assert [example.id for example in load_examples(str(output))] == [row["id"] for row in rows]
    suspects = [row for _, row in read_rows(str(output.with_suffix(".suspects.jsonl")))]
    assert 0.3 < sum(row["spoiled"] for row in suspects) / len(suspects) < 0.9
    assert sum(row["spoiled"] for row in suspects) > 0.5 * 40
