"""The exercises: a gap is named, a solution passes, a typical mistake fails with its reason."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs" / "exercises"))

import grade

GRADERS = {grader.__name__: grader for grader in grade.GRADERS}
SOLUTIONS = grade.FOLDER / "solutions"

each_exercise = pytest.mark.parametrize("name", GRADERS)


def exercise(name: str) -> str:
    return (grade.FOLDER / f"{name}.py").read_text()


def solution(name: str) -> str:
    return (SOLUTIONS / f"{name}.py").read_text()


@pytest.fixture
def graded(tmp_path):
    """Grades a text as if it stood in the exercise's file; returns passed or not, and why."""

    def graded(name: str, text: str) -> tuple[bool, str]:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return grade.grade(GRADERS[name], path)

    return graded


def gaps(name: str) -> tuple[list[str], list[str]]:
    """The functions and the answers that are missing in an exercise, by name."""
    functions = re.findall(r"raise NotImplementedError\(\"write .*`(\w+)`\"\)", exercise(name))
    return functions, re.findall(r"^(\w+) = \.\.\.", exercise(name), re.MULTILINE)


@each_exercise
def test_the_gap_fails_and_says_what_to_write(name):
    passed, message = grade.grade(GRADERS[name], grade.FOLDER / f"{name}.py")
    functions, _ = gaps(name)
    assert not passed and re.fullmatch(rf"to do: write .*`{functions[0]}`", message)


@each_exercise
def test_the_solution_passes(name):
    passed, message = grade.grade(GRADERS[name], SOLUTIONS / f"{name}.py")
    assert passed, message


@each_exercise
def test_each_function_and_each_answer_is_graded(name, graded):
    functions, answers = gaps(name)
    assert len(functions) + len(answers) == len(re.findall(r"Error\(|= \.\.\.", exercise(name)))
    for function in functions:
        gap = f"def {function}(*_, **__):\n    raise NotImplementedError('write `{function}`')\n"
        assert graded(name, solution(name) + gap) == (False, f"to do: write `{function}`")
    for answer in answers:
        text = solution(name) + f"{answer} = ...\n"
        assert graded(name, text) == (False, f"to do: fill in {answer}")


@each_exercise
def test_the_solution_is_the_exercise_with_its_gaps_filled(name):
    lines = iter(solution(name).splitlines())
    for line in exercise(name).splitlines():
        if not re.search(r"raise NotImplementedError|= \.\.\.", line):
            assert line in lines, f"not in the solution, or in another order: {line}"


MISTAKES = {  # exercise, mistake: what stands in the solution, what instead, what the student reads
    ("ex1_weights", "sums to 1"): (
        "return 1 - rewards.detach().float().mean(dim=1)",
        "return (1 - rewards.float().mean(1)) / (1 - rewards.float().mean(1)).sum()",
        "weights sum to 1 over the batch: dividing by Σw",
    ),
    ("ex1_weights", "p̂"): ("1 - rewards", "rewards", "share of right answers"),
    ("ex1_weights", "over the batch"): ("dim=1", "dim=0", "A row holds the answers to one"),
    ("ex1_weights", "hard"): (
        "1 - rewards.detach().float().mean(dim=1)",
        "(rewards.float().mean(dim=1) < 1).float()",
        "that is `hard`",
    ),
    ("ex1_weights", "no detach"): (".detach()", "", "a gradient flows through your weights"),
    ("ex1_weights", "None"): (
        "return",
        "pass #",
        "what you gave does not fit: AttributeError: 'None",
    ),
    ("ex1_weights", "floats only"): (".float()", "", "RuntimeError: mean()"),
    ("ex2_divisor", "divides by Σw"): (
        "sum(dim=1)).sum() / mask.sum()",
        "sum(dim=1)).sum() / (weights * mask.sum(dim=1)).sum()",
        "dividing by the sum of the weights cancels how large they are",
    ),
    ("ex2_divisor", "without weight 0"): (
        "/ mask.sum()",
        "/ mask[weights > 0].sum()",
        "leaves out the tokens of weight 0",
    ),
    ("ex2_divisor", "by solutions"): ("/ mask.sum()", "/ len(mask)", "asks for tokens"),
    ("ex2_divisor", "Σw of solutions"): (
        "/ (weights * mask.sum(dim=1)).sum()",
        "/ weights.sum()",
        "a weight belongs to each *token*",
    ),
    ("ex2_divisor", "A"): ('VANISHES = "B"', 'VANISHES = "A"', "still has twice the gradient"),
    ("ex2_divisor", "C"): ('VANISHES = "B"', 'VANISHES = "C"', "not within a batch"),
    ("ex2_divisor", "b"): ('VANISHES = "B"', 'VANISHES = "b"', "'b' is none of the choices"),
    ("ex3_hard", "p of a wrong answer"): (
        "p**right * (1 - p) ** (k - right)",
        "(1 - p) ** right * p ** (k - right)",
        "Is p the probability of a *right* answer?",
    ),
    ("ex3_hard", "all outcomes alike"): (
        "p**right * (1 - p) ** (k - right) *",
        "p *",
        "must add up to 1",
    ),
    ("ex3_hard", "hard is unbiased"): ("K4 = 0.34", "K4 = 0.1", "ask expectation(hard, 0.9, 4)"),
    ("ex3_hard", "hard is OSW-FT"): ("SAME_AT_K = 1", "SAME_AT_K = 2", "`hard` says 1, OSW-FT"),
    ("ex3_hard", "mean changes"): ('CHANGE = "B"', 'CHANGE = "C"', "the mean is 1 - p for every K"),
    ("ex4_stale", "never stale"): ("if step % s == 0:", "if True:", "nothing is stale"),
    ("ex4_stale", "weighed once"): ("step % s == 0", "step == 0", "before every step"),
    ("ex4_stale", "sign"): (
        "weights - (1 - success(theta))",
        "1 - success(theta) - weights",
        "Is `weights` 1 - p, and the error",
    ),
    ("ex4_stale", "B"): ('ARE = "A"', 'ARE = "B"', "p is larger now"),
    ("ex4_stale", "saves answers"): ("ANSWERS = 1 ", "ANSWERS = 1 / 4 ", "still answered K times"),
    ("ex5_pad", "by pad id"): (
        "(positions < lengths[:, None])",
        "(tokens != PAD)",
        "leaves out the end of turn: the model would never learn to stop",
    ),
    ("ex5_pad", "padding"): (" & (positions < lengths[:, None])", "", "your mask learns padding"),
    ("ex5_pad", "prompt"): ("(positions >= prompt_lengths[:, None]) & ", "", "the mask is [[0, 1"),
    ("ex5_pad", "A"): ('WRITES = "B"', 'WRITES = "A"', "nothing has taught it to stop. It writes"),
    ("ex6_sync", "no abs"): (".abs()", "", "differences of both signs cancel"),
    ("ex6_sync", "always the largest"): (
        " if largest > 3 * usual else None",
        "",
        "all syncs were done, and you say step",
    ),
    ("ex6_sync", "never"): ("largest > 3 * usual", "largest > 1", "you say None"),
    ("ex6_sync", "one behind"): ('ZERO = "B"', 'ZERO = "A"', "ten times as large"),
    ("ex6_sync", "always stopped"): ("AT_5 = False", "AT_5 = True", "nobody but you looks"),
    ("ex7_weighting", "plug-in"): (
        "k / (k - 1) * ",
        "",
        "the mean of your weight is 0.0450, 0.500 times p (1 - p) = 0.0900",
    ),
    ("ex7_weighting", "B"): ('RIGHT = "A"', 'RIGHT = "B"', "is 1/4 * 1 + 1/2 * 1/4"),
    ("ex8_groups", "std of all"): (
        "std(dim=1, keepdim=True)",
        "std(dim=1, keepdim=True, correction=0)",
        "that of a sample by G - 1",
    ),
    ("ex8_groups", "0 / 0"): (" + 1e-6", "", "0 / 0 is not a number"),
    ("ex8_groups", "batch mean"): (
        "rewards.mean(dim=1, keepdim=True)",
        "rewards.mean()",
        "compare an answer with its own group",
    ),
    ("ex8_groups", "all right alone"): (" + (1 - p) ** g", "", "all wrong has no signal either"),
}


@pytest.mark.parametrize("name, mistake", MISTAKES)
def test_a_typical_mistake_fails_with_its_reason(name, mistake, graded):
    right, wrong, reason = MISTAKES[name, mistake]
    assert right in solution(name)
    passed, message = graded(name, solution(name).replace(right, wrong))
    assert not passed and reason in message, message


def test_an_error_in_the_students_code_is_shown_with_its_line(graded):
    text = solution("ex1_weights").replace("rewards.detach()", "reward.detach()")
    line = text[: text.index("reward.detach()")].count("\n") + 1
    passed, message = graded("ex1_weights", text)
    assert not passed and message.startswith(
        f"line {line}: NameError: name 'reward' is not defined"
    )
    passed, message = graded("ex1_weights", text.replace("reward.", "(reward."))
    assert not passed and message.startswith(f"line {line}: SyntaxError")


def test_the_grader_prints_a_line_for_each_exercise_and_its_status_says_whether_all_passed(
    monkeypatch, capsys
):
    monkeypatch.setattr(grade, "FOLDER", SOLUTIONS)
    assert grade.main() == 0
    output = capsys.readouterr().out
    assert [line.split()[:2] for line in output.splitlines() if line[0] != " "] == [
        *([name, "passed."] for name in GRADERS),
        ["8", "of"],
    ]
    assert grade.main("9") == 1  # there is none


def test_make_exercises_grades_one_and_its_status_says_that_it_is_not_passed():
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(folders)}
    command = ["make", "exercises", "ONLY=1", "INSTALLED="]  # nothing is installed
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "ex1_weights    to do: write `oswft_weights`\n0 of 1 passed\n" in result.stdout
