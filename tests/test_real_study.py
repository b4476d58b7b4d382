"""The fourth study's problems and measures (real/); its runs take hours."""

import itertools
import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from conftest import SHARED, needs_shared
from data import InputError, read_rows
from demo.tiny import make_config, make_tokenizer
from real import problems, report
from real.score import EQUATION, divergence, log_probabilities
from verify import is_correct


@needs_shared
def test_the_sets_have_the_planned_sizes_right_solutions_and_no_question_twice(tmp_path):
    problems.main(SHARED / "data", tmp_path)
    sets = {path.stem: [row for _, row in read_rows(str(path))] for path in tmp_path.iterdir()}
    sizes = {"words_held": 256, "words_train": 960, "easy_train": 960, "easy_held": 128}
    sizes |= {"easy_base_0": 4000, "easy_base_1": 4000, "multiarith": 128, "train": 1920}
    sizes |= {"instructions_train": 124, "instructions_held": 128}
    assert {name: len(rows) for name, rows in sets.items()} == sizes
    del sets["train"]
    questions = [row["question"] for rows in sets.values() for row in rows]
    assert len(set(questions)) == len(questions)
    for name, rows in sets.items():
        for row in rows if "instructions" not in name else ():
            assert is_correct(row["solution"], row["answer"]), row
            expert = not name.startswith("easy_base")
            assert bool(EQUATION.fullmatch(row["solution"].split("\n")[0])) == expert, row


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(InputError, match="svamp"):
        problems.main(tmp_path)


def test_the_divergence_is_the_kl_of_the_base_from_the_model_over_the_answers_tokens():
    torch.manual_seed(0)
    config = make_config(make_tokenizer(), vocab_size=40, initializer_range=0.3)
    model, base = (Qwen3ForCausalLM(config).eval() for _ in range(2))
    pairs = [([1, 2], [3, 4, 5]), ([6], [7])]
    answers = [(*pair, log_probabilities(base, *pair)) for pair in pairs]
    assert divergence(base, answers) == pytest.approx(0, abs=1e-6)
    total = 0.0
    for prompt, answer in pairs:
        for n in range(len(answer)):
            with torch.no_grad():
                p, q = (
                    m(torch.tensor([prompt + answer[:n]])).logits[0, -1].softmax(0)
                    for m in (base, model)
                )
            total += sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert divergence(model, answers) == pytest.approx(total / 4, rel=1e-4)


def test_runs_are_compared_at_equal_gain_and_in_pairs():
    base = {"run": "base", "base_hash": "a", "gain": 0.0, "kl": 0.0, "style": 0.0}
    rows = [base, {**base, "base_hash": "b"}]
    rows += [{"run": "sft-0.1", "base_hash": "a", "seed": 9, "checkpoints": [{"gain": 0.4}]}]
    levels = report.levels_of(rows)
    assert levels == pytest.approx([0.2, 0.3])
    spent = {"step": 10, "train_tokens": 1000, "rollout_tokens": 0, "seconds": 1}
    slopes = {"sft": 2, "oswft": 1, "half": 1, "static": 1}
    for name, (arm, slope) in itertools.product("ab", slopes.items()):
        points = [
            {"gain": g, "kl": slope * g + 0.01 * (name == "b"), "style": g} for g in (0.1, 0.5)
        ]
        points = [point | spent for point in points]
        rows.append({"run": arm, "base_hash": name, "seed": 0, "checkpoints": points})
    alone = {"run": "oswft", "base_hash": "a", "seed": 1, "checkpoints": [{"gain": 0.9, **spent}]}
    curves = report.read_curves([*rows, alone])
    tflops = [curves[arm, "a", 0].TFLOPs.iloc[-1] for arm in ("sft", "oswft")]
    assert tflops == pytest.approx([0.807, 0.807 + 2 * 134.5e6 * 10 * 64 * 79.6 / 1e12])
    assert report.score(curves["sft", "a", 0], "kl", levels) == pytest.approx(0.5)
    assert report.score(curves["sft", "a", 0], "kl", [0.3, 0.6]) == pytest.approx(
        0.6
    )  # of the first
    assert report.score(curves["sft", "a", 0], "kl", [0.6]) == 1.0  # reaches none: its last
    lines = [line.split(" | ") for line in report.tests(curves, levels)]
    assert [line[4:6] for line in lines] == [
        ["-0.250 ± 0.000", "2"],
        ["+0.000 ± 0.000", "2"],
        ["+0.000 ± 0.000", "2"],
        ["+0.000 ± 0.000", "2"],
    ]
