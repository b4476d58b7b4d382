"""Seconds from a command to its first result, beside its imports alone: python -m bench.start"""

import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import BASE, tiny_base

PACKAGES = "from transformers import AutoModelForCausalLM; from vllm import LLM"


def until_written(command: list[str], folder: Path, pattern: str) -> float:
    """Seconds until a file of the pattern in `folder` has its first line."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, *command, "--output_dir", str(folder), "--precision", "fp32"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not any(path.stat().st_size for path in folder.glob(pattern)):
            if process.poll():
                sys.exit(f"error: status {process.returncode}: {' '.join(command)}")
            time.sleep(0.01)
        return time.perf_counter() - began


def until_imported(packages: str) -> float:
    """Seconds of a Python process that imports and does nothing else."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"{packages}; import os; os._exit(0)"], check=True)
    return time.perf_counter() - began


def main(base: Path = BASE, repetitions: int = 5) -> list[str]:
    """Measure with the tiny model in `base`; returns Markdown."""
    tiny_base(base)
    model = ["--model", str(base / "model"), "--max_completion_length", "48"]
    train = ["train_oswft.py", *model, "--data", str(base / "train.jsonl"), "--max_length", "128"]
    evaluate = ["evaluate.py", *model, "--benchmark_file", str(base / "heldout" / "easy.jsonl")]
    evaluate += ["--num_samples", "1"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        calls = {
            "`train_oswft.py`, to its first step": partial(
                until_written, [*train, "--max_steps", "1"], folder, "metrics.jsonl"
            ),
            "`evaluate.py`, to its first answers": partial(
                until_written, evaluate, folder, "samples.rank*.jsonl"
            ),
            "the imports of transformers and vLLM alone": partial(until_imported, PACKAGES),
        }
        measured = take_turns(calls, repetitions)
    training, evaluation, imports = measured.values()
    rows = [[n, f"{median(s):.1f}", f"{ratio(s, imports):.2f}"] for n, s in measured.items()]
    return [
        "One process, without a launcher (DeepSpeed's takes about 4 s more), the demo's model, "
        "files in the system's cache.",
        markdown_table(["", "s", "÷ imports"], rows),
        goal("s to the first step", median(training), "≤ 8")
        + "\n"
        + goal("s to the first answers", median(evaluation), "≤ 6"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
