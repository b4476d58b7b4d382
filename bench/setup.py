"""What is measured: the demo's tiny model and its data, random rows, runs of the scripts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np

from data import Example, TokenizedExample, load_examples, load_tokenizer, tokenize_examples
from demo.tiny import copy

BASE = Path("runs/bench/base")  # the demo's tiny model and its data
MAX_TOKENS = 48  # of an answer of the tiny model
BATCH = 128  # rows to an optimizer step
COLD = 2  # first steps of a run, which are slower and do not count
PHASES = ("sync_s", "rollout_s", "verify_s", "train_s")


def tiny_base(base: Path) -> Path:
    """The folder of the demo's tiny model and its data; copied if it is not there."""
    if not (base / "heldout").is_dir():
        copy(base)
    return base


def load_rows(model: Path, data: Path, max_length: int) -> list[TokenizedExample]:
    """A training file as the training scripts read it."""
    tokenizer = load_tokenizer(str(model))
    return tokenize_examples(load_examples(str(data)), tokenizer, max_length, MAX_TOKENS)[0]


def random_rows(lengths: list[tuple[int, int]], vocabulary: range) -> list[TokenizedExample]:
    """Rows of random tokens with the given lengths of prompt and completion."""
    rng, example = np.random.default_rng(0), Example("-", "-", "-", "7", "bench")

    def ids(count: int) -> list[int]:
        return rng.integers(vocabulary.start, vocabulary.stop, count).tolist()

    return [TokenizedExample("-", ids(first), ids(then), example) for first, then in lengths]


def run_steps(
    script: str, model: Path, data: Path, max_length: int, steps: int
) -> dict[str, float]:
    """Of a training script's steps: means of seconds by phase and of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--model", model, "--data", data, "--precision", "fp32"]
        command += ["--max_length", max_length, "--max_completion_length", MAX_TOKENS]
        command += ["--learning_rate", 1e-12, "--max_steps", COLD + steps]  # it hardly moves
        command += ["--output_dir", f"{folder}/run"]
        subprocess.run([str(word) for word in command], check=True)
        metrics = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in metrics[COLD:]]
    columns = (*PHASES, "train_tokens", "rollout_tokens")
    return {name: mean(row.get(name, 0) for row in rows) for name in columns}
