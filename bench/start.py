"""Seconds from a command to its first result, next to its imports alone: python -m bench.start"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.measure import goal, markdown_table, print_section, ratio, spread, take_turns, timed
from bench.setup import BASE, tiny_base

IMPORTS = "from transformers import AutoModelForCausalLM; from vllm import LLM; import os; "
IMPORTS += "os._exit(0)"  # Python's own end would take seconds


def until_written(command: list, pattern: str) -> float:
    """Seconds until a file of the pattern in the output folder has its first line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *map(str, command), "--output_dir", f"{folder}/run"]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while not any(path.stat().st_size for path in Path(folder).glob(f"run/{pattern}")):
                if process.poll():
                    sys.exit(f"error: status {process.returncode}: {' '.join(command)}")
                time.sleep(0.01)
            return time.perf_counter() - began


def main(base: Path = BASE, repetitions: int = 5) -> list[str]:
    """Measure with the tiny model in `base`; returns Markdown."""
    model = ["--model", tiny_base(base) / "model", "--max_completion_length", 48]
    model += ["--precision", "fp32"]
    train = ["train_oswft.py", *model, "--data", base / "train.jsonl", "--max_length", 128]
    train += ["--max_steps", 1]
    evaluate = ["evaluate.py", *model, "--benchmark_file", base / "heldout" / "easy.jsonl"]
    evaluate += ["--num_samples", 1]
    python = partial(subprocess.run, [sys.executable, "-c", IMPORTS], check=True)
    calls = {
        "`train_oswft.py`, to its first step": partial(until_written, train, "metrics.jsonl"),
        "`evaluate.py`, to its first answers": partial(until_written, evaluate, "samples.*"),
        "the imports of transformers and vLLM alone": partial(timed, python),
    }
    measured = take_turns(calls, repetitions)
    training, evaluation, imports = measured.values()
    rows = [[name, spread(s, ".1f"), ratio(s, imports)] for name, s in measured.items()]
    return [
        "One process, without a launcher (DeepSpeed's takes about 4 s more), the demo's model, "
        "files in the system's cache.",
        markdown_table(["", "s", "÷ imports"], rows),
        goal("s to the first step", "the imports", ratio(training, imports), "≤ 1.25"),
        goal("s to the first answers", "the imports", ratio(evaluation, imports), "≤ 1.25"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
