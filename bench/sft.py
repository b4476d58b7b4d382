"""The optimizer step of train_sft.py next to TRL's SFTTrainer: python -m bench.sft"""

import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench import peers
from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import BASE, BATCH, load_rows, run_steps, tiny_base
from data import write_rows
from engine import share_cores


def write_mixed(path: Path, count: int) -> None:
    """Write rows of random digits whose lengths vary as real ones do."""
    rng = np.random.default_rng(0)

    def digits(length: int) -> str:
        return "".join(map(str, rng.integers(10, size=length)))

    def row(n: int) -> dict[str, str]:
        solution = digits(min(int(rng.lognormal(np.log(80), 0.8)) + 1, 440))
        question = digits(rng.integers(5, 38))  # and 11 tokens of the template
        return {"id": f"{n}", "question": question, "solution": solution, "answer": "7"}

    write_rows(({**row(n), "source": "bench"} for n in range(count)), path)


def main(base: Path = BASE, repetitions: int = 5, steps: int = 6) -> list[str]:
    """Measure with the tiny model in `base`; a turn has so many steps. Returns Markdown."""
    share_cores()
    model = tiny_base(base) / "model"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_mixed(data, BATCH * steps)
        rows = load_rows(model, data, 512)
        calls = {
            "`train_sft.py`": partial(run_steps, "train_sft.py", model, data, 512, steps),
            "TRL, 128 rows at once": peers.sft(model, rows, 128, "random"),
            "TRL, 32 rows at once": peers.sft(model, rows, 32, "random"),
            "TRL, 32 at once, grouped by length": peers.sft(model, rows, 32, "group_by_length"),
        }
        measured = take_turns(calls, repetitions)
    tokens = sum(map(len, rows)) / steps  # of a step, padding not counted
    rates = {
        name: [turn.get("train_tokens", tokens) / turn["train_s"] for turn in turns]
        for name, turns in measured.items()
    }
    ours, *others = rates.values()
    table = [[name, f"{median(r):,.0f}", f"{ratio(ours, r):.2f}"] for name, r in rates.items()]
    return [
        f"Tiny model (0.4M parameters), fp32, one rank, {BATCH} rows to an optimizer step, padding "
        "not counted; prompts of 16 to 48 tokens, solutions log-normal about 80, at most 440.",
        markdown_table(["", "tokens/s", "ours is faster by"], table),
        goal("tokens/s ÷ TRL's fastest", min(ratio(ours, r) for r in others), "≥ 1.3"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
