"""What a part costs, measured on this machine beside what one would use instead.

    python bench.py curate    # `data.py curate` on a generated release of 200 MB: speed and memory

Quote ratios: they hold on other machines, seconds do not.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import tyro
from tqdm import tqdm

RELEASE = 14.6e9  # bytes of AM-Qwen3-Distilled's math.jsonl
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


# ------------------------------------------------------------------------------------------------
# Curation


def write_release(path: Path, num_bytes: int, seed: int = 0) -> None:
    """Write rows in the release's schema: three in five of NuminaMath, one in eight of all rows a
    multiple-choice question of NuminaMath; the tokens of a solution are log-normal about 3,500."""
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
    """Wait for a process; returns the bytes that it and its children held together at most."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # one has just ended
            tree = [root, *root.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in tree))
        time.sleep(0.1)
    return peak


def curate(
    tokenizer: str = "Qwen/Qwen3-0.6B-Base", megabytes: int = 200, repetitions: int = 5
) -> None:
    """Rows per second and memory of `data.py curate`, beside a loop that only parses the rows.

    Args:
        tokenizer: hub id or folder.
        megabytes: size of the generated release; a quarter of it shows that memory does not grow.
        repetitions: of each measurement, in turns.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        whole, quarter = Path(folder, "whole.jsonl"), Path(folder, "quarter.jsonl")
        write_release(whole, megabytes * 10**6)
        write_release(quarter, megabytes * 10**6 // 4)
        rows = {path: sum(1 for _ in path.open()) for path in (whole, quarter)}

        def run(release: Path, workers: int) -> tuple[float, int]:
            """Seconds of reading and sifting, as the command reports them, and peak memory."""
            command = [sys.executable, "data.py", "curate", "--input", release]
            command += ["--tokenizer", tokenizer, "--output", Path(folder, "train.jsonl")]
            command += ["--num_workers", workers, "--skip_benchmark_check", "--allow_fewer"]
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=Path(__file__).parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            peak = peak_memory(process)
            found = re.search(r"rows in ([\d.]+) s", process.communicate()[0])
            if process.returncode or not found:
                sys.exit(f"error: {' '.join(process.args)} failed")
            return float(found[1]), peak

        def parse(release: Path, _: int) -> tuple[float, int]:
            began = time.monotonic()
            for line in release.open("rb"):
                json.loads(line)
            return time.monotonic() - began, 0

        cases = {
            "json.loads alone, one process": (parse, whole, 1),
            "curate, 1 worker": (run, whole, 1),
            f"curate, {cores} workers": (run, whole, cores),
            f"curate, {cores} workers, a quarter of the rows": (run, quarter, cores),
        }
        measured: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
        for _ in tqdm(range(repetitions), desc="repetitions"):
            for name, (call, *arguments) in cases.items():
                measured[name].append(call(*arguments))

        print(
            f"\n{rows[whole]:,} rows of {whole.stat().st_size / rows[whole] / 1e3:.0f} kB; ", end=""
        )
        print(f"medians of {repetitions} repetitions on {cores} cores, start-up left out\n")
        print("| | s | rows/s | MB/s | peak memory, MiB |\n|---|---|---|---|---|")
        for name, (_, release, workers) in cases.items():
            seconds = statistics.median(s for s, _ in measured[name])
            peak = max(peak for _, peak in measured[name]) / 2**20
            rate = release.stat().st_size / seconds / 1e6
            print(f"| {name} | {seconds:.1f} | {rows[release] / seconds:,.0f} ", end="")
            print(f"| {rate:.1f} | {f'{peak:.0f}' if peak else ''} |")
            if release == whole and workers == cores:
                minutes = RELEASE / rate / 1e6 / 60
        print(f"\nthe release's 14.6 GB at the rate of {cores} workers: {minutes:.0f} min")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"curate": curate}, description=__doc__, use_underscores=True
    )
