"""The study of docs/study/plan4.md: its runs, one after another; what was stopped goes on.

    python -m real.model --output runs/real/raw
    python -m real.problems --source data/others --output runs/real/data
    python -m real.study --stage base --base 0        # W0 and its gate
    python -m real.study --stage rates                # SFT at three rates on W0, seed 9
    python -m real.study --stage arms --base 0 --seed 0

Each run of an arm adds a row to docs/study/fourth.jsonl, with the scores of its checkpoints.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from data import read_rows, write_json, write_rows
from evaluate import model_version, read_samples
from run import checkpoints, one_line_errors, read_args

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "docs" / "study" / "fourth.jsonl"
LENGTHS = ("--max_length", 512, "--max_completion_length", 96)
SAMPLED = ("--temperature", 1.0, "--top_p", 1.0, "--top_k", 0)
BASE_RATE, BASE_STEPS = 1e-4, 70  # of stage 0, chosen on W0 by the gate: one epoch of 4,500 rows


@dataclass(kw_only=True)
class Args:
    stage: Literal["base", "rates", "arms"]
    base: int = 0  # W0 or W1
    seed: int = 0  # of an arm: order of the data, and sampling
    learning_rate: float = 1e-4  # r, chosen by stage "rates"
    folder: Path = Path("runs/real")  # with raw/ and data/
    commonsense: Path = Path("data/others/commonsenseqa_dev.jsonl")


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
    return read_samples(output)[name]


# ---- Stage 0


def make_base(number: int, folder: Path) -> Path:
    """W0 or W1: easy problems in the base's style, and the raw model's own answers."""
    answers = evaluate(folder / "raw", "instructions_train", folder, samples=12, tokens=160)
    whole = [row for row in answers if row["finish_reason"] == "stop" and row["text"].strip()]
    whole.sort(key=lambda row: (row["sample"], row["id"]))
    asked = {row["id"]: row for _, row in read_rows(f"{folder}/data/instructions_train.jsonl")}
    own = [
        {**asked[row["id"]], "id": f"own-{n}", "solution": row["text"].strip()}
        for n, row in enumerate(whole[:500])
    ]
    easy = [row for _, row in read_rows(f"{folder}/data/easy_base_{number}.jsonl")]
    data, run = folder / f"base_{number}.jsonl", folder / f"W{number}"
    write_rows(easy + own, data)
    print(f"{len(easy)} easy problems and {len(own)} own answers -> {data}", flush=True)
    flags = ("--learning_rate", BASE_RATE, "--train_batch_size", 64, "--max_steps", BASE_STEPS)
    flags += ("--seed", number, "--save_every", 10)
    train("train_sft.py", run, "--model", folder / "raw", "--data", data, *flags)
    return run / "final"


def gate(model: Path, folder: Path) -> dict:
    """Whether a base has mastered the easy problems and not the real ones."""
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


# ---- The arms


def add_row(args: Args, name: str, run: Path, base: Path, **values) -> None:
    """Append what a run gave, and what it came from, to the committed rows."""
    record = read_args(run)
    row = {"run": name, "base": args.base, "seed": args.seed, **values}
    row |= {"base_hash": model_version(str(base / "final")), "commit": record["git_commit"]}
    row |= {"versions": record["versions"], "cores": os.cpu_count()}
    row["machine"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    with ROWS.open("a") as out:
        out.write(json.dumps(row) + "\n")


def score(args: Args, base: Path, models: Iterable[Path]) -> list[dict]:
    """The scores of each model; those that are there already are not made again."""
    files = {model: model.with_suffix(".scores.json") for model in models}
    if todo := [model.relative_to(args.folder) for model in files if not files[model].exists()]:
        flags = ("--folder", args.folder, "--base", base.name, "--commonsense", args.commonsense)
        call("-m", "real.score", *flags, "--seed", args.seed, "--models", *todo)
    return [json.loads(path.read_text()) for path in files.values()]


def run_arm(
    name: str, args: Args, rate: float, data: Path, *flags, steps: int = 60, points: int = 6
) -> None:
    """Train, score the checkpoints, and add a row."""
    base, run = args.folder / f"W{args.base}", args.folder / f"{name}-W{args.base}-{args.seed}"
    script = "train_oswft.py" if name == "oswft" else "train_sft.py"
    settings = ("--learning_rate", rate, "--max_steps", steps, "--seed", args.seed)
    settings += ("--save_every", steps // points, "--keep_checkpoints", 20, *flags)
    train(script, run, "--model", base / "final", "--data", data, *settings)
    saved = checkpoints(run).items()  # a stop saves one, too, which does not count
    found, spent = {step: path for step, path in saved if step % (steps // points) == 0}, []
    metrics = [row for _, row in read_rows(str(run / "metrics.jsonl"))]
    for step, scores in zip(found, score(args, base, found.values()), strict=True):
        done = metrics[:step]
        sums = {k: sum(row.get(k, 0) for row in done) for k in ("train_tokens", "rollout_tokens")}
        seconds = sum(v for row in done for k, v in row.items() if k.endswith("_s"))
        spent.append({"step": step, **scores, **sums, "seconds": seconds})
    add_row(args, name, run, base, learning_rate=rate, checkpoints=spent)
    for _, path in saved:
        shutil.rmtree(path / "state", ignore_errors=True)  # 1.6 GB each


def main(args: Args) -> None:
    rows = [row for _, row in read_rows(str(ROWS))] if ROWS.exists() else []
    done = {(row["run"], row["base"], row["seed"]) for row in rows}
    data, r, sft = args.folder / "data/train.jsonl", args.learning_rate, ("--train_batch_size", 64)
    if args.stage == "base":
        args.seed = args.base  # of its data and their order
        run = make_base(args.base, args.folder).parent
        passed = gate(run / "final", args.folder)
        print(json.dumps(passed))
        scored = {row["base_hash"] for row in rows if row["run"] == "base"}
        if model_version(str(run / "final")) not in scored:  # another machine may train another one
            measured = score(args, run, [run / "final"])
            add_row(args, "base", run, run, learning_rate=BASE_RATE, gate=passed, **measured[0])
        return
    if args.stage == "rates":
        args.base, args.seed = 0, 9
        arms = {f"sft-{rate}": (rate, data, *sft) for rate in (1e-5, 3e-5, 1e-4)}
    else:
        weighted = args.folder / f"W{args.base}/weighted.jsonl"
        arms = {"sft": (r, data, *sft), "oswft": (r, data, "--rollout_batch_size", 64)}
        arms["half"] = (r / 2, data, *sft)
        arms["static"] = (r, weighted, *sft, "--weight_column", "weight")
    for name, arm in arms.items():
        if (name, args.base, args.seed) not in done:
            points = 1 if args.stage == "rates" else 6  # r is chosen by the gain after 60 steps
            run_arm(name, args, *arm, steps=120 if name == "half" else 60, points=points)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.study", description=__doc__))
