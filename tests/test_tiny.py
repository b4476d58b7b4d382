"""The small world, and its tiny base: what is committed, and what makes another one."""

from data import load_examples, load_tokenizer
from demo import tiny
from demo.world import PRETRAIN_MIX, TIERS, TRAIN_MIX, make_examples, solve

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM


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
            left, result = step.split("=")
            left, _, work = left.partition(":")
            assert left[0] == value
            a, operator, b = int(left[0]), left[1], int(left[2])
            exact = {"<": min(a, b), ">": max(a, b)}.get(operator)
            exact = eval(f"{a}{operator.replace('^', '**')}{b}") if exact is None else exact
            assert int(result) == exact % 10 and (work[-1:] or result) == result
            assert len(work) == (2 if style == "scratch" else 0)
            value, shown = result, shown + left[1:]
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


def test_the_base_has_not_seen_the_retention_tiers_in_the_experts_style():
    assert {tier for style, tier in PRETRAIN_MIX if style != "plain"} == {*TRAIN_MIX}


def test_a_tenth_of_the_references_is_made_wrong_by_one_slip_that_the_rest_follows(tmp_path):
    tiny.write_problems(tmp_path, num_train=200)
    tiny.spoil_file(tmp_path)
    rows = {
        name: [example.columns for example in load_examples(str(tmp_path / f"{name}.jsonl"))]
        for name in ("train", "train-wrong")
    }
    spoiled = [pair for pair in zip(*rows.values(), strict=True) if pair[1].pop("spoiled")]
    assert len(spoiled) == 20
    assert sum(clean != row for clean, row in zip(*rows.values(), strict=True)) == 20
    for clean, row in spoiled:
        assert row["question"] == clean["question"] and row["answer"] != clean["answer"]
        assert row["solution"].endswith(f"boxed{{{row['answer']}}}")
        slips = 0
        for step in row["solution"].removeprefix("@").split(";")[:-1]:
            (left, work), result = step.split("=")[0].split(":"), step[-1]
            slips += solve(left, "scratch")[1] != result
            assert work[1] == result
        assert slips == 1


def test_a_base_that_is_made_has_the_shape_and_the_tokenizer_of_the_committed_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tiny, "LEVELS", {})  # ends at step 20
    tiny.make(tmp_path / "made", num_train=64, seed=0)
    tiny.copy(tmp_path / "copied")
    folders = tmp_path / "made", tmp_path / "copied"
    models = [AutoModelForCausalLM.from_pretrained(folder / "model") for folder in folders]
    made, copied = (model.state_dict() for model in models)
    assert {name: x.shape for name, x in made.items()} == {n: x.shape for n, x in copied.items()}
    assert any(not torch.equal(x, copied[name]) for name, x in made.items())
    ours, theirs = (load_tokenizer(str(folder / "model")) for folder in folders)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    for tier in TIERS:  # at one seed the problems are the same
        made, copied = (load_examples(str(f / "heldout" / f"{tier}.jsonl")) for f in folders)
        assert made == copied
