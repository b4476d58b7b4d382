"""The exercises: a gap is named, a solution passes, a typical mistake fails with its reason."""

import re
import sys

from conftest import ROOT

import pytest

sys.path.insert(0, str(ROOT / "docs" / "exercises"))

import grade

GRADERS = {grader.__name__: grader for grader in grade.GRADERS}


def exercise(name: str) -> str:
    return (grade.FOLDER / f"{name}.py").read_text()


def solved(name: str) -> str:
    """An exercise with its gaps filled, as Python reads it: what comes last counts."""
    return exercise(name) + (grade.FOLDER / "solutions" / f"{name}.py").read_text()


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """Grades a text as if it stood in the exercise's file; returns passed or not, and why."""
    monkeypatch.setattr(grade, "write_after_training", lambda _: "")  # a second each time

    def graded(name: str, text: str) -> tuple[bool, str]:
        (tmp_path / f"{name}.py").write_text(text)
        return grade.grade(GRADERS[name], tmp_path / f"{name}.py")

    return graded


@pytest.mark.parametrize("name", GRADERS)
def test_an_exercise_passes_when_each_gap_is_filled_and_each_answer_right(name, graded):
    functions = re.findall(r"raise NotImplementedError\(\"write `(\w+)`\"\)", exercise(name))
    answers = re.findall(r"^(\w+) = \.\.\.", exercise(name), re.MULTILINE)
    assert len(functions) + len(answers) == len(re.findall(r"Error\(|= \.\.\.", exercise(name)))
    assert graded(name, exercise(name)) == (False, f"not done yet: write `{functions[0]}`")
    assert graded(name, solved(name))[0], graded(name, solved(name))
    for function in functions:
        gap = f"def {function}(*_):\n    raise NotImplementedError('write `{function}`')\n"
        assert graded(name, solved(name) + gap) == (False, f"not done yet: write `{function}`")
    for answer in answers:
        text, (right, hint) = f"{solved(name)}{answer} = ", grade.RIGHT[answer]
        assert graded(name, text + "...") == (False, f"not done yet: fill in {answer}")
        wrong = {str: "D", bool: not right, float: 7.0, list: [0]}[type(right)]
        reason = f"not right yet: {answer} is not {wrong!r}: {hint}"
        assert graded(name, text + repr(wrong)) == (False, reason)


MISTAKES = [  # exercise, what stands in the solution, what instead, what the student reads
    ("ex1_weights", "1 - rewards", "rewards", "gives p̂, the share of right answers"),
    ("ex1_weights", ".detach()", "", "a gradient flows through your weights"),
    ("ex2_divisor", "/ mask", "/ (weights[:, None] * mask)", "divides by the sum of the weights"),
    ("ex3_hard", "p**right * (1 - p) ** (k - right)", "0.5**k", "outcomes as equally probable"),
    ("ex4_stale", "if step % s == 0", "if True", "renews the weights at every step"),
    ("ex5_pad", "(positions < lengths[:, None])", "(tokens != PAD)", "leaves out the end of turn"),
    ("ex5_pad", " & (positions < lengths[:, None])", "", "learns padding"),
    ("ex6_sync", ".abs()", "", "cancels differences of both signs"),
    ("ex7_weighting", "k / (k - 1) * ", "", "has a mean of 1/2, 2/3, 3/4 times p (1 - p)"),
    ("ex8_groups", "dim=1, keepdim=True", "", "compares with the whole batch"),
    ("ex8_groups", " + (1 - p) ** g", "", "a group that is all wrong has no signal either"),
]


@pytest.mark.parametrize("name, right, wrong, reason", MISTAKES)
def test_a_typical_mistake_fails_with_its_reason(name, right, wrong, reason, graded):
    before, text = exercise(name), solved(name).removeprefix(exercise(name))
    assert right in text
    passed, message = graded(name, before + text.replace(right, wrong))
    assert not passed and reason in message, message


def test_the_grader_prints_each_exercise_and_says_if_all_passed(monkeypatch, tmp_path, capsys):
    assert grade.main("1") == 1 and "\n0 of 1 passed" in capsys.readouterr().out
    for name in GRADERS:
        (tmp_path / f"{name}.py").write_text(solved(name))
    monkeypatch.setattr(grade, "FOLDER", tmp_path)
    assert grade.main() == 0
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.findall(r"(ex\w+) passed\.", output) == [*GRADERS] and "8 of 8 passed" in output
    assert "by position 1+2=3<|im_end|>" in output  # the tiny model has learnt to stop
