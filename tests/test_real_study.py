"""The fourth study's problems and measures (real/); its runs take hours."""

import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from conftest import SHARED, needs_shared
from data import InputError, read_rows
from demo.tiny import make_config, make_tokenizer
from real import problems
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
