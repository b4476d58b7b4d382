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
    solution, _, hints = grade.solve(name)
    assert sorted(hints) == sorted(answers)
    assert graded(name, exercise(name)) == (False, f"not done yet: write `{functions[0]}`")
    assert graded(name, solved(name))[0], graded(name, solved(name))
    for function in functions:
        gap = f"def {function}(*_):\n    raise NotImplementedError('write `{function}`')\n"
        assert graded(name, solved(name) + gap) == (False, f"not done yet: write `{function}`")
    for answer in answers:
        text, right, hint = f"{solved(name)}{answer} = ", solution[answer], hints[answer]
        assert graded(name, text + "...") == (False, f"not done yet: fill in {answer}")
        wrong = {str: "D", bool: not right, list: [0]}.get(type(right), 7.0)
        reason = f"not right yet: {answer} is not {wrong!r}: {hint}"
        assert graded(name, text + repr(wrong)) == (False, reason)


MISTAKES = [  # exercise, what stands below its solution (SOLVED), what the student reads
    (1, "oswft_weights = lambda r: (1 - r.float().mean(1)).tolist()", "gives a list, but its"),
    (1, "oswft_weights = lambda r: 1 - r.float().numpy().mean(1)", "gives a ndarray, but its"),
    (1, "oswft_weights = lambda r: 1 - r.float().mean(1)", "a gradient flows through your weights"),
    (1, "oswft_weights = lambda r: SOLVED(r[:, :3])", "is a size or a type of theirs written"),
    (1, "oswft_weights = lambda r: SOLVED(r)[:, None]", "must return the shape (5,)"),
    (1, "oswft_weights = lambda r: SOLVED(r) + 0 * r.neg_()[:, 0]", "changes its input"),
    (2, "loss_by_tokens = lambda *given: SOLVED(*given).detach()", "loses the gradient"),
    (2, "FACTOR_BY_TOKENS = True", "write a number"),
    (3, "expectation = lambda f, p, k: 1 - (p if f is oswft else p**k)", "Other cases are right"),
    (3, "HARD_GOES_TO = 0.99", "yours is near: is it rounded badly, or did"),
    (4, "weights_in_use = lambda i, s, o, p: 1 - p if i in (0, 4, 8) or s == 1 else o", "Other st"),
    (4, "weights_in_use = lambda i, s, o, p: 1 - p if i % s == 0 and i < 12 else o", "Other steps"),
    (5, "mask_by_position = lambda *given: SOLVED(*given).int()", "gives torch.int32"),
    (6, "find_forgotten = lambda g: next((i for i in range(10) if g[i] > 0.003), None)", "in all"),
    (6, "find_forgotten = lambda gaps: SOLVED(gaps[:10])", "only gaps of one run"),
    (7, "WEIGHTS_AT_K2 = [0.5, 0]", "two answers agree or differ"),
    (8, "no_signal = lambda p, g: p**3 + (1 - p) ** 3", "is a p or a g written into the code?"),
    (8, "GRPO_G8 = 0.91", "yours is near: is it rounded badly"),
    (8, "WEIGHT = B", 'a letter is written in quotes: "B"'),
]


@pytest.mark.parametrize("number, wrong, reason", MISTAKES)
def test_a_typical_mistake_fails_with_its_reason(number, wrong, reason, graded):
    name = [*GRADERS][number - 1]
    text = f"{solved(name)}\nSOLVED = globals().get({wrong.split()[0]!r})\n{wrong}"
    passed, message = graded(name, text)
    assert not passed and reason in message, message


@pytest.mark.parametrize("name", GRADERS)
def test_each_mistake_that_stands_with_the_solution_hears_its_own_hint(name, graded):
    table = solved(name).partition("HINTS = ")[2].splitlines()
    for place, (right, arrow, wrong) in enumerate(row.partition(" -> ") for row in table):
        if arrow:
            hint = next(row.strip() for row in table[place:] if row.startswith(" "))
            text = solved(name).removeprefix(exercise(name)).replace(right, wrong)
            passed, message = graded(name, exercise(name) + text)
            assert not passed and f"` {hint}" in message, (right, wrong, message)


def test_the_grader_prints_each_exercise_and_says_if_all_passed(monkeypatch, tmp_path, capsys):
    assert grade.main("1") == 1 and "\n0 of 1 passed" in capsys.readouterr().out
    for name in GRADERS:
        (tmp_path / f"{name}.py").write_text(solved(name))
    monkeypatch.setattr(grade, "FOLDER", tmp_path)
    assert grade.main() == 0
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.findall(r"(ex\w+) passed\.", output) == [*GRADERS] and "8 of 8 passed" in output
    assert "by position 1+2=3<|im_end|>" in output  # the tiny model has learnt to stop
