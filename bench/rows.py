"""What a larger training file costs, from 1,000 rows to 1,000,000: python -m bench.rows"""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

import train_sft
from bench.measure import extra_memory, goal, markdown_table, print_section
from data import batch_indices
from demo.tiny import make_tokenizer
from demo.world import TRAIN_MIX, make_examples
from engine import init_distributed
from run import load_training_data

SIZES = (1_000, 10_000, 100_000, 1_000_000)  # rows
BATCH, BATCHES = 128, 50  # rows of a batch, and how many of them are drawn
DRAW = "ms to draw a batch"


def write_file(path: Path, rows: int) -> None:
    """Write so many rows: the same 1,000 problems again and again, each time with other ids."""
    problems = make_examples(1000, TRAIN_MIX, np.random.default_rng(0), set())
    columns = [problem.columns for problem in problems]
    with path.open("w") as file:
        for n in range(rows):
            file.write(json.dumps({**columns[n % len(columns)], "id": f"row-{n}"}) + "\n")


def start_up(folder: Path, data: Path) -> tuple[float, float, float]:
    """What every rank does at the start: CPU-seconds, peak MiB; and then ms to draw a batch."""
    lengths = {"max_length": 512, "max_completion_length": 128}
    args = train_sft.Args(model=str(folder), data=str(data), **lengths)
    loaded = []

    def load() -> list:
        loaded.append(load_training_data(args)[1])
        return []  # no tensors

    began = time.process_time()  # one turn of the largest file has no other to compare with:
    _, peak = extra_memory(load)  # a clock on the wall would measure the neighbours, too
    seconds, [examples] = time.process_time() - began, loaded
    batch_indices(len(examples), BATCH, 0, seed=0)  # the epoch's order, once
    began = time.process_time()
    for batch in range(BATCHES):
        for i in batch_indices(len(examples), BATCH, batch, seed=0):
            examples[i]
    return seconds, peak / 2**20, 1000 * (time.process_time() - began) / BATCHES


def main(sizes: tuple[int, ...] = SIZES) -> list[str]:
    """Measure; returns Markdown."""
    init_distributed()
    measured = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer().save_pretrained(folder)
        for rows in sizes:
            data = folder / f"{rows}.jsonl"
            write_file(data, rows)
            turns = [start_up(folder, data) for _ in range(1 + 10_000 // rows)]  # the first is cold
            measured.append([median(values) for values in zip(*turns, strict=True)])
        size = data.stat().st_size / rows
    seconds, memory, batch = zip(*measured, strict=True)  # of each, one for each size
    table = [
        [f"{what}, {rows:,} rows", f"{value:,.2f}", f"{value / values[0]:.2f}", rows // sizes[0]]
        for what, values in (("CPU-seconds to start", seconds), ("peak MiB", memory), (DRAW, batch))
        for rows, value in zip(sizes, values, strict=True)
    ]
    return [
        f"Rows like the demo's, {size:.0f} bytes each: what every rank does before a run begins "
        "(read, check, tokenize), the memory that this adds to the process at its peak, and "
        f"then a batch of {BATCH} (the mean of {BATCHES}, when the epoch's order is there).",
        markdown_table(["", "", "grown by", "linear"], table),
        goal("CPU-seconds to start, the worst growth ÷ linear", worst(sizes, seconds), "≤ 1.1"),
        goal("peak memory, the worst growth ÷ linear", worst(sizes, memory), "≤ 1"),
        goal("a batch from the largest file ÷ from the smallest", batch[-1] / batch[0], "≤ 1.5"),
    ]


def worst(sizes: Sequence[int], values: Sequence[float]) -> float:
    """How much faster than the sizes the values grow, at most, from the first of them."""
    larger = list(zip(sizes, values, strict=True))[1:]
    return max(value / values[0] / (size / sizes[0]) for size, value in larger)


if __name__ == "__main__":
    print_section(main, __doc__)
