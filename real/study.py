"""The study of docs/study/plan4.md: its runs, one after another; a run that was stopped goes on.

python -m real.model --output runs/real/raw
python -m real.problems --source ../shared/data --output runs/real/data
python -m real.study --stage base --seed 0      # W0, then its gate
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from data import read_rows, write_json, write_rows
from run import one_line_errors

ROOT = Path(__file__).parent.parent
LENGTHS = ("--max_length", 512, "--max_completion_length", 96)
SAMPLED = ("--temperature", 1.0, "--top_p", 1.0, "--top_k", 0)
BASE_RATE, BASE_STEPS = 1e-4, 70  # of stage 0, chosen on W0 by the gate: one epoch of 4,500 rows


@dataclass(kw_only=True)
class Args:
    stage: Literal["base"]
    seed: int = 0
    folder: Path = Path("runs/real")  # with raw/ and data/


def call(*command) -> None:
    """Run Python with these arguments. Raises CalledProcessError."""
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def train(script: str, run: Path, *flags) -> None:
    """A training run: begun, continued, or done already."""
    if not (run / "final").exists():
        begun = (run / "args.json").exists()
        call(script, *(("--resume", run) if begun else ("--output_dir", run, *LENGTHS, *flags)))


def evaluate(model: Path, name: str, folder: Path, samples: int, tokens: int = 96) -> list[dict]:
    """The model's answers to a set, at T = 1. An evaluation that was stopped goes on."""
    output = folder / "answers" / "-".join(model.relative_to(folder).parts) / name
    flags = ("--num_samples", samples, "--max_completion_length", tokens, *SAMPLED)
    paths = ("--benchmark_file", folder / "data" / f"{name}.jsonl", "--output_dir", output)
    call("evaluate.py", "--model", model, *paths, *flags)
    return [row for path in sorted(output.glob("samples.*")) for _, row in read_rows(str(path))]


def base(seed: int, folder: Path) -> Path:
    """W0 or W1: easy problems in the base's style, and the raw model's own answers."""
    answers = evaluate(folder / "raw", "instructions_train", folder, samples=12, tokens=160)
    whole = [row for row in answers if row["finish_reason"] == "stop" and row["text"].strip()]
    whole.sort(key=lambda row: (row["sample"], row["id"]))
    asked = {row["id"]: row for _, row in read_rows(f"{folder}/data/instructions_train.jsonl")}
    own = [
        {**asked[row["id"]], "id": f"own-{n}", "solution": row["text"].strip()}
        for n, row in enumerate(whole[:500])
    ]
    easy = [row for _, row in read_rows(f"{folder}/data/easy_base_{seed}.jsonl")]
    data, run = folder / f"base_{seed}.jsonl", folder / f"W{seed}"
    write_rows(easy + own, data)
    print(f"{len(easy)} easy problems and {len(own)} own answers -> {data}", flush=True)
    flags = ("--learning_rate", BASE_RATE, "--train_batch_size", 64, "--max_steps", BASE_STEPS)
    flags += ("--seed", seed, "--save_every", 10)
    train("train_sft.py", run, "--model", folder / "raw", "--data", data, *flags)
    return run / "final"


def gate(model: Path, folder: Path) -> dict:
    """Whether a base has mastered the easy problems and not the real ones (plan4, stage 0)."""
    weighted = model.parent / "weighted.jsonl"
    data = ("--data", folder / "data" / "train.jsonl", "--output", weighted, "--num_rollouts", 2)
    call("-m", "prepare.weigh", "--model", model, *data, *LENGTHS)
    rows = [row for _, row in read_rows(str(weighted))]
    weights = Counter(row["weight"] for row in rows)
    easy = evaluate(model, "easy_held", folder, samples=4)
    seen = {
        "weight 0": weights[0.0] / len(rows),
        "weight 1": weights[1.0] / len(rows),
        "easy pass@1": sum(row["correct"] for row in easy) / len(easy),
    }
    seen["passed"] = min(seen["weight 0"], seen["weight 1"]) >= 0.25 and seen["easy pass@1"] >= 0.85
    write_json(seen, model.parent / "gate.json")
    return seen


def main(args: Args) -> None:
    print(json.dumps(gate(base(args.seed, args.folder), args.folder)))


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.study", description=__doc__))
