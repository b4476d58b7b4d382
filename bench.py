"""What a part costs, measured on this machine beside what one would use instead.

    python bench.py curate    # `data.py curate` on a generated release of 200 MB: speed and memory

Quote ratios: they hold on other machines, seconds do not.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import tyro

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


def peak_memory(process: subprocess.Popen, peaks: list[int]) -> None:
    """Append the bytes that a process and its children held together at their worst."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        try:
            tree = [root, *root.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in tree))
        except psutil.NoSuchProcess:
            pass  # it ended just now
        time.sleep(0.1)
    peaks.append(peak)


def curate(
    tokenizer: str = "Qwen/Qwen3-0.6B-Base", megabytes: int = 200, repetitions: int = 5
) -> None:
    """Rows per second and memory of `data.py curate`, beside a loop that only reads the rows.

    Args:
        tokenizer: hub id or folder.
        megabytes: size of the generated release; a quarter of it shows that memory does not grow.
        repetitions: of each measurement, in turns.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole, quarter = Path(folder, "whole.jsonl"), Path(folder, "quarter.jsonl")
        write_release(whole, megabytes * 10**6)
        write_release(quarter, megabytes * 10**6 // 4)
        num_rows = sum(1 for _ in whole.open())
        print(f"{num_rows:,} rows, {whole.stat().st_size / num_rows / 1e3:.1f} kB each")

        def run(release: Path, workers: int) -> float:
            command = [sys.executable, "data.py", "curate", "--input", release]
            command += ["--tokenizer", tokenizer, "--output", Path(folder, "train.jsonl")]
            command += ["--num_workers", workers, "--skip_benchmark_check", "--allow_fewer"]
            began = time.monotonic()
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=Path(__file__).parent,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            watch = threading.Thread(target=peak_memory, args=(process, memory[release, workers]))
            watch.start()
            if process.wait():
                sys.exit(f"error: {' '.join(process.args)} failed")
            watch.join()
            return time.monotonic() - began

        def parse() -> float:
            began = time.monotonic()
            for line in whole.open("rb"):
                json.loads(line)
            return time.monotonic() - began

        cores = psutil.cpu_count()
        cases = [(whole, 1), (whole, cores), (quarter, cores)]
        seconds: dict = {case: [] for case in ["parse", *cases]}
        memory: dict = {case: [] for case in cases}
        for _ in range(repetitions):
            seconds["parse"].append(parse())
            for case in cases:
                seconds[case].append(run(*case))
        start_up = "the whole command, start-up included"
        print(f"median of {repetitions}, {cores} cores; {start_up}\n")
        print("| | s | rows/s | MB/s | peak memory, MiB |\n|---|---|---|---|---|")
        names = ["json.loads in a loop", *(f"curate, {n} workers, {p.stem}" for p, n in cases)]
        for name, (case, values) in zip(names, seconds.items(), strict=True):
            median = statistics.median(values)
            share = 0.25 if case != "parse" and case[0] == quarter else 1
            peak = f"{max(memory[case]) / 2**20:,.0f}" if case in memory else ""
            rows, rate = share * num_rows / median, share * megabytes / median
            print(f"| {name} | {median:.1f} | {rows:,.0f} | {rate:.1f} | {peak} |")
        # What start-up takes drops out of the difference between the two sizes.
        whole_s, quarter_s = (statistics.median(seconds[p, cores]) for p in (whole, quarter))
        rate = 0.75 * megabytes * 1e6 / (whole_s - quarter_s)
        print(f"\nbeyond start-up {rate / 1e6:.1f} MB/s: 14.6 GB in {RELEASE / rate / 60:.0f} min")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"curate": curate}, description=__doc__, use_underscores=True
    )
