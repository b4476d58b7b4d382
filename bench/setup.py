"""What is measured: the paper's models by their sizes, rows, and steps of the scripts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from data import Example, TokenizedExample, load_examples, load_tokenizer, tokenize_examples

MODEL, DATA = Path("runs/sft/final"), Path("data/train.jsonl")  # as docs/real-model.md makes them
MAX_LENGTH, MAX_TOKENS = 512, 96  # of a row, and of an answer
QUERIES = 32  # of an optimizer step
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
COLD = 2  # a process's first steps, which are slower and do not count


def random_rows(lengths: list[tuple[int, int]], vocabulary: range) -> list[TokenizedExample]:
    """Rows of random tokens with the given lengths of prompt and completion."""
    rng, example = np.random.default_rng(0), Example("-", "-", "-", "7", "bench")

    def ids(count: int) -> list[int]:
        return rng.integers(vocabulary.start, vocabulary.stop, count).tolist()

    return [TokenizedExample("-", ids(first), ids(then), example) for first, then in lengths]


def load_rows(model: Path, data: Path) -> list[TokenizedExample]:
    tokenizer = load_tokenizer(str(model))
    return tokenize_examples(load_examples(str(data)), tokenizer, MAX_LENGTH, MAX_TOKENS)[0]


def step_seconds(script: str, model: Path, data: Path, **flags) -> float:
    """Of a training script's optimizer step after `COLD` others."""
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"max_length": MAX_LENGTH, "max_completion_length": MAX_TOKENS, "model": model}
        flags |= {"data": data, "output_dir": f"{folder}/run", "max_steps": COLD + 1}
        flags |= {"learning_rate": 1e-12}  # the model hardly moves
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        subprocess.run([sys.executable, script, *words], check=True)
        last = Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1]
    return sum(value for name, value in json.loads(last).items() if name.endswith("_s"))
