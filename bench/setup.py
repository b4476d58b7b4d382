"""What is measured: the demo's tiny model, one of 29M parameters, rows, runs of the scripts."""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from data import (
    Example,
    TokenizedExample,
    load_examples,
    load_tokenizer,
    tokenize_examples,
    write_rows,
)
from demo.tiny import copy, make_config, make_tokenizer

BASE = Path("runs/bench/base")  # the demo's tiny model and its data
MAX_TOKENS = 48  # of an answer of the tiny model
BATCH = 128  # rows to an optimizer step
SMALL = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
SMALL |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
SMALL |= {"max_position_embeddings": 1024, "initializer_range": 0.005}
QWEN3_ALL = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
QWEN3_ALL |= {"max_position_embeddings": 32_768, "tie_word_embeddings": True}
QWEN3 = {  # the paper's three models: width, its MLP's, layers, heads
    name: QWEN3_ALL
    | dict(hidden_size=h, intermediate_size=m, num_hidden_layers=n, num_attention_heads=heads)
    for name, h, m, n, heads in (
        ("0.6B", 1024, 3072, 28, 16),
        ("1.7B", 2048, 6144, 28, 16),
        ("4B", 2560, 9728, 36, 32),
    )
}
MEAN_LENGTH = 128  # of the small model's answers
COLD = 2  # a process's first steps, which are slower and do not count
PHASES = ("sync_s", "rollout_s", "verify_s", "train_s")


def tiny_base(base: Path) -> Path:
    """The folder of the demo's tiny model and its data; copied if it is not there."""
    if not (base / "heldout").is_dir():
        copy(base)
    return base


def small_model(folder: Path) -> Path:
    """A random model of 29M parameters, whose answers end after each token with the same chance.

    Their length is geometric. All other tokens are about equally likely.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_config(make_config(tokenizer, **SMALL))
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1  # so that the first number of a hidden state is about the same for all
        ids = torch.randint(len(embedding), (8, MEAN_LENGTH))
        first = model.model(ids).last_hidden_state[..., 0].mean()
        embedding[tokenizer.eos_token_id, 0] += math.log(len(embedding) / MEAN_LENGTH) / first
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_mixed(path: Path, count: int, median: int, longest: int) -> Path:
    """Write rows whose lengths vary as real ones do, log-normally; the template adds 11 tokens."""
    rng = np.random.default_rng(0)
    questions = rng.integers(5, 38, count)
    lengths = np.minimum(rng.lognormal(math.log(median), 0.8, count).astype(int) + 1, longest)
    rows = (
        {"id": f"{n}", "question": "7" * q, "solution": "8" * s, "answer": "8", "source": "bench"}
        for n, (q, s) in enumerate(zip(questions, lengths, strict=True))
    )
    write_rows(rows, path)
    return path


def load_rows(model: Path, data: Path, max_length: int) -> list[TokenizedExample]:
    """A training file as train_sft.py reads it."""
    tokenizer = load_tokenizer(str(model))
    return tokenize_examples(load_examples(str(data)), tokenizer, max_length, 1)[0]


def random_rows(lengths: list[tuple[int, int]], vocabulary: range) -> list[TokenizedExample]:
    """Rows of random tokens with the given lengths of prompt and completion."""
    rng, example = np.random.default_rng(0), Example("-", "-", "-", "7", "bench")

    def ids(count: int) -> list[int]:
        return rng.integers(vocabulary.start, vocabulary.stop, count).tolist()

    return [TokenizedExample("-", ids(first), ids(then), example) for first, then in lengths]


def run_steps(script: str, model: Path, data: Path, steps: int, **flags) -> dict[str, float]:
    """Of a training script's steps after `COLD` more: means of seconds by phase and of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"model": model, "data": data, "precision": "fp32", "output_dir": f"{folder}/run"}
        flags |= {"learning_rate": 1e-12, "max_steps": COLD + steps}  # the model hardly moves
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        subprocess.run([sys.executable, script, *words], check=True)
        metrics = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in metrics[COLD:]]
    columns = (*PHASES, "train_tokens", "rollout_tokens")
    return {name: mean(row.get(name, 0) for row in rows) for name in columns}
