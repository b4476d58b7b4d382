"""Real problems, the real vocabulary."""

import json
import subprocess
import sys

from conftest import ROOT, SHARED, launch, metrics, needs_shared, released
from data import write_rows


@needs_shared
def test_real_problems_with_the_real_vocabulary_over_two_ranks(tmp_path):
    python = sys.executable
    rows = tmp_path / "train.jsonl"
    curate = ["-m", "prepare.curate", "--input", tmp_path / "release.jsonl", "--output", rows]
    curate += ["--tokenizer", SHARED / "qwen3_tokenizer", "--benchmarks_dir", SHARED / "data"]
    with (SHARED / "data" / "aqua_dev.jsonl").open() as source:
        write_rows([released(json.loads(line)) for line in source], tmp_path / "release.jsonl")
    subprocess.run([python, *curate, "--num_examples", "200"], cwd=ROOT, check=True)
    init = ["-m", "demo.tiny", "init", "--tokenizer", SHARED / "qwen3_tokenizer"]
    subprocess.run([python, *init, "--output_dir", tmp_path / "model"], cwd=ROOT, check=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == 151_936
    launch(
        "train_oswft.py",
        *("--model", tmp_path / "model", "--data", rows, "--output_dir", tmp_path / "run"),
        *("--max_steps", 2, "--rollout_batch_size", 8, "--max_tokens_per_micro_batch", 2048),
        *("--max_length", 1536, "--max_completion_length", 128),
        ranks=2,
    )
    first, second = metrics(tmp_path / "run")
    assert 11 < first["loss"] < 13  # ln(151,936) = 11.9: nothing is known yet
    assert first["mean_weight"] == 1 and first["train_tokens"] > 1000
    assert first["completion_length_max"] == 128 and second["grad_norm"] > 0
