"""The small world: its problems, their solutions, and what is made wrong."""

import re

from data import load_examples, write_rows
from demo.tiny import spoil_file
from demo.world import TIERS, TRAIN_MIX, make_examples, solve

import numpy as np
import pytest


@pytest.mark.parametrize("style", ["plain", "scratch"])
@pytest.mark.parametrize("tier", TIERS)
def test_problems_are_solved_by_their_own_steps_in_both_styles(tier, style):
    examples = make_examples(30, {tier: 1}, np.random.default_rng(0), set())
    assert len({example.question for example in examples}) == 30
    for example in examples:
        solution, answer = solve(example.question, style)
        assert answer == example.answer and solution.startswith("@") == (style == "scratch")
        *steps, box = solution.removeprefix("@").split(";")
        value, shown = example.question[0], example.question[0]
        for step in steps:
            form = r"(.)(.)(.):.(.)=\4" if style == "scratch" else r"(.)(.)(.)=(.)"
            left, operator, right, result = re.fullmatch(form, step).groups()
            a, b = int(left), int(right)
            exact = {"<": min(a, b), ">": max(a, b), "^": a**b, "+": a + b, "-": a - b, "*": a * b}
            assert left == value and int(result) == exact[operator] % 10
            value, shown = result, shown + operator + right
        assert shown == example.question and box == f"\\boxed{{{value}}}" and value == answer
        operators, count = TIERS[tier]
        assert len(steps) == count and operators[-1] in shown and set(shown[1::2]) <= {*operators}


def test_no_question_is_drawn_twice_and_the_mix_is_kept():
    examples, taken = [], set()
    for _ in range(2):  # the same draws, were the first ones not taken
        examples += make_examples(2000, TRAIN_MIX, np.random.default_rng(0), taken)
    assert len({example.question for example in examples}) == 4000
    for tier, share in TRAIN_MIX.items():
        assert sum(example.source == tier for example in examples) == 4000 * share


def test_a_tenth_of_the_references_is_made_wrong_by_one_slip_that_the_rest_follows(tiny, tmp_path):
    rows = [example.columns for example in load_examples(str(tiny / "train.jsonl"))]
    write_rows(rows[:200], tmp_path / "train.jsonl")
    spoil_file(tmp_path)
    rows = {
        name: [example.columns for example in load_examples(str(tmp_path / f"{name}.jsonl"))]
        for name in ("train", "train-wrong")
    }
    spoiled = [pair for pair in zip(*rows.values(), strict=True) if pair[1].pop("spoiled")]
    assert len(spoiled) == 20
    assert sum(clean != row for clean, row in zip(*rows.values(), strict=True)) == 20
    for clean, row in spoiled:
        assert row["question"] == clean["question"] and row["answer"] != clean["answer"]
        steps = re.findall(r"(...):.(.)=(.)", row["solution"])
        assert all(work == result for _, work, result in steps)
        assert sum(solve(left, "scratch")[1] != result for left, _, result in steps) == 1
        assert row["solution"].endswith(f"boxed{{{row['answer']}}}")
