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

each_exercise = pytest.mark.parametrize("name", GRADERS)


def exercise(name: str) -> str:
    return (grade.FOLDER / f"{name}.py").read_text()


def solution(name: str) -> str:
    return (grade.SOLUTIONS / f"{name}.py").read_text()


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
    passed, message = grade.grade(GRADERS[name], grade.SOLUTIONS / f"{name}.py")
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
    ("ex1_weights", "over the batch"): ("dim=1", "dim=0", "A row holds the four answers to one"),
    ("ex1_weights", "hard"): (
        "1 - rewards.detach().float().mean(dim=1)",
        "(rewards.float().mean(dim=1) < 1).float()",
        "that is `hard`",
    ),
    ("ex1_weights", "no detach"): (".detach()", "", "a gradient flows through your weights"),
    ("ex1_weights", "None"): ("return", "pass #", "gave None: is there a `return`?"),
    ("ex1_weights", "one of K answers"): (
        "1 - rewards.detach().float().mean(dim=1)",
        "1 - rewards.float()[:, 0]",
        "not [0.0, 0.0, 1.0]",
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
    ("ex2_divisor", "sign"): ("return -(", "return (", "loss_by_tokens: the sign is wrong"),
    ("ex2_divisor", "twice by tokens"): (
        "/ (weights * mask.sum(dim=1)).sum()",
        "/ mask.sum()",
        "that is loss_by_tokens again",
    ),
    ("ex2_divisor", "clamp"): (
        "/ (weights * mask.sum(dim=1)).sum()",
        "/ (weights * mask.sum(dim=1)).sum().clamp(min=1)",
        "is there a clamp?",
    ),
    ("ex2_divisor", "one loss per row"): (
        "sum(dim=1)).sum() / mask.sum()",
        "sum(dim=1)) / mask.sum()",
        "must return one number, yours has the shape (4,)",
    ),
    ("ex2_divisor", "A"): ('VANISHES = "B"', 'VANISHES = "A"', "still has twice the gradient"),
    ("ex2_divisor", "C"): ('VANISHES = "B"', 'VANISHES = "C"', "not within a batch"),
    ("ex2_divisor", "b"): ('VANISHES = "B"', 'VANISHES = "b"', "'b' is none of the choices"),
    ("ex3_hard", "p of a wrong answer"): (
        "p**right * (1 - p) ** (k - right)",
        "(1 - p) ** right * p ** (k - right)",
        "is p the probability of a *right* answer?",
    ),
    ("ex3_hard", "all outcomes alike"): (
        "p**right * (1 - p) ** (k - right) *",
        "p *",
        "must add up to 1",
    ),
    ("ex3_hard", "uniform"): (
        "p**right * (1 - p) ** (k - right)",
        "0.5**k",
        "are all outcomes equally probable?",
    ),
    ("ex3_hard", "all answers alike"): (
        "return total",
        "return p * value((1,) * k) + (1 - p) * value((0,) * k)",
        "expectation(hard, 0.5, 2) is 0.75, yours is 0.5: each of the 2^K outcomes",
    ),
    ("ex3_hard", "value of p"): (
        "return total",
        "return value((p,) * k)",
        "expectation(hard, 0.5, 2) is 0.75, yours is 0: each of the 2^K outcomes",
    ),
    ("ex3_hard", "a list"): ("AT_K = 1", "AT_K = [1]", "SAME_AT_K is [1]: write one number"),
    ("ex3_hard", "not a letter"): ('CHANGE = "B"', "CHANGE = [1]", "write one letter in quotes"),
    ("ex3_hard", "hard is unbiased"): ("K4 = 0.34", "K4 = 0.1", "ask expectation(hard, 0.9, 4)"),
    ("ex3_hard", "hard is OSW-FT"): ("SAME_AT_K = 1", "SAME_AT_K = 2", "`hard` says 1, OSW-FT"),
    ("ex3_hard", "mean changes"): ('CHANGE = "B"', 'CHANGE = "C"', "the mean is 1 - p for every K"),
    ("ex4_stale", "never stale"): ("if step % s == 0:", "if True:", "nothing is stale"),
    ("ex4_stale", "weighed once"): ("step % s == 0", "step == 0", "before every step"),
    ("ex4_stale", "sign"): (
        "weights - (1 - success(theta))",
        "1 - success(theta) - weights",
        "keep the sign",
    ),
    ("ex4_stale", "p"): (
        "weights = 1 - success",
        "weights = success",
        "must be 0, and is -0.50. Is `weights` 1 - p",
    ),
    ("ex4_stale", "all questions"): ("[part].mean().item()", ".mean().item()", "[part]"),
    ("ex4_stale", "size alone"): ("[part].mean().item()", "[part].abs().mean().item()", "keep the"),
    ("ex4_stale", "four ages"): (
        "AGES = [0, 1, 2, 3, 0, 1, 2, 3]",
        "AGES = [0, 1, 2, 3]",
        "a list of 8 numbers, yours has 4",
    ),
    ("ex4_stale", "B"): ('ARE = "A"', 'ARE = "B"', "p is larger now"),
    ("ex4_stale", "saves answers"): ("ANSWERS = 1 ", "ANSWERS = 1 / 4 ", "still answered K times"),
    ("ex5_pad", "by pad id"): (
        "(positions < lengths[:, None])",
        "(tokens != PAD)",
        "leaves out the end of turn: the model would never learn to stop",
    ),
    ("ex5_pad", "by pad id, and the last"): (
        "return (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])",
        "return mask_by_pad_id(tokens, prompt_lengths) | (positions == lengths[:, None] - 1)",
        "a token inside a solution may have the pad's id",
    ),
    ("ex5_pad", "one too far"): ("(positions < l", "(positions <= l", "go up to lengths - 1"),
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
    ("ex6_sync", "the step before"): (
        "return gaps.index(largest) if largest > 3 * usual else None",
        "return next((i for i in range(1, len(gaps)) if gaps[i] > 2 * gaps[i - 1]), None)",
        "cannot see step 0",
    ),
    ("ex6_sync", "one behind"): ('ZERO = "B"', 'ZERO = "A"', "ten times as large"),
    ("ex6_sync", "always stopped"): ("AT_5 = False", "AT_5 = True", "nobody but you looks"),
    ("ex7_weighting", "plug-in"): (
        "k / (k - 1) * ",
        "",
        "the mean of your weight is 0.500, 0.667, 0.750 times p (1 - p) at K = 2, 3, 4",
    ),
    ("ex7_weighting", "two of K answers"): (
        "return k",
        "return rewards[:, 0] * (1 - rewards[:, 1]) #",
        "use all answers, and not their order",
    ),
    ("ex7_weighting", "first and last"): (
        "return k",
        "return (rewards[:, 0] != rewards[:, -1]) / 2 #",
        "use all answers, and not their order",
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


@pytest.mark.parametrize(
    "name, one_way, another",
    [
        ("ex2_divisor", "FACTOR_BY_TOKENS = 0.1", "FACTOR_BY_TOKENS = torch.tensor(0.1)"),
        ("ex4_stale", "[0, 1, 2, 3, 0, 1, 2, 3]", "(0, 1, 2, 3, 0, 1, 2, 3)"),
        ("ex4_stale", ".item()", ""),  # and no warning of torch
        ("ex7_weighting", "[0.0, 0.5]", "(0, 1 / 2)"),
        ("ex7_weighting", "return k", "return rewards.var(dim=1) #"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_right_answer_passes_in_another_form(name, one_way, another, graded):
    assert one_way in solution(name)
    passed, message = graded(name, solution(name).replace(one_way, another))
    assert passed, message


def test_an_error_in_the_students_code_is_shown_with_its_line(graded):
    text = solution("ex1_weights").replace("rewards.detach()", "reward.detach()")
    line = text[: text.index("reward.detach()")].count("\n") + 1
    passed, message = graded("ex1_weights", text)
    assert not passed and message.startswith(
        f"line {line}: NameError: name 'reward' is not defined"
    )
    passed, message = graded("ex1_weights", text.replace("reward.", "(reward."))
    assert not passed and message.startswith(f"line {line}: SyntaxError")
    text = text.replace("return 1 - reward.", "raise NotImplementedError('of torch')  # ")
    assert graded("ex1_weights", text) == (False, f"line {line}: NotImplementedError: of torch")


def test_the_grader_prints_a_line_for_each_exercise_and_its_status_says_whether_all_passed(
    monkeypatch, capsys
):
    monkeypatch.setattr(grade, "FOLDER", grade.SOLUTIONS)
    assert grade.main() == 0
    output = capsys.readouterr().out
    assert [line.split()[:2] for line in output.splitlines() if line[0] != " "] == [
        *([name, "passed."] for name in GRADERS),
        ["8", "of"],
    ]
    for unknown in (("9",), ("ex3",), ("1", "2")):
        assert grade.main(*unknown) == 1
        assert "give one number, 1 to 8" in capsys.readouterr().out


def test_make_exercises_grades_one_and_its_status_says_that_it_is_not_passed():
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(folders)}
    command = ["make", "exercises", "ONLY=1", "INSTALLED="]  # nothing is installed
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "ex1_weights    to do: write `oswft_weights`\n0 of 1 passed\n" in result.stdout
