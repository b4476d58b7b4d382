"""Rows per second and memory of prepare.curate beside json.loads: python -m bench.curate"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from bench.measure import markdown_table, print_section, take_turns, timed

RELEASE = 14_600  # megabytes of AM-Qwen3-Distilled's math.jsonl
SENTENCES = (  # of made-up reasoning; {} is a number
    "Okay, let's see what the problem asks. We start from {} and {}.",
    "So $x^2 + {}x - {} = 0$, and the discriminant is ${} + {}$.",
    "Wait, I should check that again: {} times {} is {}, not {}.",
    "The triangle has sides $\\frac{{{}}}{{{}}}$ and $\\sqrt{{{}}}$, so its area follows.",
    "Therefore the remaining part is {}% of the total, which gives {}.",
    "Alternatively, suppose that the train travels at {} km per hour for {} hours.",
    "Hmm, but then the sum of the digits would be {}, and that cannot be divisible by {}.",
    "Let me plug in $n = {}$: the left side becomes ${} \\cdot {}$, as it should.\n\n",
)


def write_release(path: Path, num_bytes: int, seed: int = 0) -> None:
    """Write rows in the release's schema.

    Three in five are of NuminaMath; one in eight is a multiple-choice question of NuminaMath. The
    tokens of a solution are log-normal about 3,500.
    """
    rng = np.random.default_rng(seed)

    def text(num_sentences: int) -> str:
        numbers = iter(rng.integers(1, 1000, 4 * num_sentences).tolist())
        chosen = rng.integers(len(SENTENCES), size=num_sentences).tolist()
        return " ".join(SENTENCES[i].format(*[next(numbers) for _ in range(4)]) for i in chosen)

    with path.open("w") as file:
        while file.tell() < num_bytes:
            numina, choice = rng.random() < 0.6, rng.random() < 0.21
            question, think = text(3), text(int(rng.lognormal(np.log(125), 0.7)) + 1)
            answer = str(rng.choice(list("ABCDE"))) if choice else str(rng.integers(1000))
            if choice:
                question += "".join(f"\n({letter}) {rng.integers(1000)}" for letter in "ABCDE")
            said = f"{text(12)}\n\n**Answer:** $\\boxed{{{answer}}}$"
            source = "NuminaMath_1.5" if numina else "openR1Math_extended"
            info = {"source": source, "category": "math", "ground_truth": answer}
            value = f"<think>{think}</think><answer>{said}</answer>"
            told = {"think_content": think, "answer_content": said, "verify_score": 1.0}
            human = {"from": "human", "value": question, "info": info}
            assistant = {"from": "assistant", "value": value, "info": told}
            file.write(json.dumps({"system": "", "conversations": [human, assistant]}) + "\n")


def peak_memory(process: subprocess.Popen) -> int:
    """Wait for a process; returns the most bytes that it and its children held together."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # one has just ended
            tree = [root, *root.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in tree))
        time.sleep(0.1)
    return peak


def curate(tokenizer: str, release: Path, workers: int) -> tuple[float, int]:
    """Seconds of reading and sifting, as the command reports them, and its peak memory.

    With 0 workers the rows are only parsed, and no memory is measured.
    """
    if not workers:
        return timed(lambda: [json.loads(line) for line in release.open("rb")]), 0
    command = [sys.executable, "-m", "prepare.curate", "--input", str(release)]
    command += ["--tokenizer", tokenizer, "--output", str(release.with_name("train.jsonl"))]
    command += ["--num_workers", str(workers), "--skip_benchmark_check", "--allow_fewer"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, text=True, **quiet)
    peak = peak_memory(process)
    found = re.search(r"rows in ([\d.]+) s", process.communicate()[0])
    if process.returncode or not found:
        sys.exit(f"error: {shlex.join(command)} failed")
    return float(found[1]), peak


def main(
    tokenizer: str = "Qwen/Qwen3-0.6B-Base", megabytes: int = 200, repetitions: int = 5
) -> list[str]:
    """Measure on a generated release, and on a quarter of it, as memory should not grow."""
    cores = len(os.sched_getaffinity(0))
    rows, rates, all_cores = [], {}, f"`curate`, {cores} workers"
    with tempfile.TemporaryDirectory() as folder:
        whole, quarter = Path(folder, "whole.jsonl"), Path(folder, "quarter.jsonl")
        write_release(whole, megabytes * 10**6)
        write_release(quarter, megabytes * 10**6 // 4)
        size = {path: path.stat().st_size for path in (whole, quarter)}
        count = {path: sum(1 for _ in path.open()) for path in (whole, quarter)}
        cases = {
            "`json.loads` alone, one process": (whole, 0),
            "`curate`, 1 worker": (whole, 1),
            all_cores: (whole, cores),
            f"{all_cores}, a quarter of the rows": (quarter, cores),
        }
        calls = {name: partial(curate, tokenizer, *case) for name, case in cases.items()}
        measured = take_turns(calls, repetitions, warm_up=0)
    for name, (release, _) in cases.items():
        seconds = median(s for s, _ in measured[name])
        peak = max(peak for _, peak in measured[name])
        rates[name] = size[release] / seconds / 1e6
        row = [name, f"{seconds:.1f}", f"{count[release] / seconds:,.0f}", f"{rates[name]:.1f}"]
        rows.append([*row, f"{peak / 2**20:.0f}" if peak else ""])
    row_size = size[whole] / count[whole] / 1e3
    minutes = RELEASE / rates[all_cores] / 60
    return [
        f"{count[whole]:,} generated rows of {row_size:.0f} kB, start-up left out.",
        markdown_table(["", "s", "rows/s", "MB/s", "peak memory, MiB"], rows),
        f"The release's 14.6 GB at the rate of {cores} workers: {minutes:.0f} min",
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
