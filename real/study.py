"""The study of docs/study/plan5.md: its runs, one after another; what was stopped goes on.

    python -m real.model --output runs/fifth/raw
    python -m real.problems --source data/others --output runs/fifth/data
    python -m real.study --regime S --stage base         # E and its gate
    python -m real.study --regime S --seed 0             # a triple: A, B, C, then their scores
    python -m real.study --regime O --stage base         # W and its gate
    python -m real.study --regime O --stage rates        # SFT at three rates, seed 9
    python -m real.study --regime O --seed 0 --learning_rate ...

Each run adds a row to runs/fifth/fifth.jsonl, which docs/study/fifth.jsonl is a copy of: so the
commit that a run records stays clean.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arguments import one_line_errors
from data import (
    InputError,
    batch_indices,
    load_examples,
    load_tokenizer,
    read_rows,
    tokenize_examples,
    write_json,
)
from evaluate import model_version
from real.score import SAMPLES
from run import checkpoints, read_args

import torch
import tyro

ROOT = Path(__file__).parent.parent
LENGTHS = ("--max_length", 512, "--max_completion_length", 96)
STEPS, BATCH = 60, 32
COUNTED = {"A": (20, 30, 40, 50, 60), "B": (40, 50, 60), "C": (40, 50, 60)}
# The least share of each weight over the training rows
GATES = {"S": {0.0: 1 / 4, 1.0: 1 / 4, 0.5: 1 / 8}, "O": {0.0: 1 / 2, 1.0: 1 / 5}}


@dataclass(kw_only=True)
class Args:
    regime: Literal["S", "O"]
    stage: Literal["base", "rates", "triple"] = "triple"
    seed: int = 0  # of a triple: order of the data, and sampling
    learning_rate: float = 5e-5  # r of regime S; that of O is chosen by its rates
    folder: Path = Path("runs/fifth")  # with raw/ and data/; also gets the rows, fifth.jsonl
    precision: Literal["bf16", "fp32"] = "bf16"  # the plan's; without AVX-512 a step takes minutes


def call(*command) -> None:
    """Run Python with these arguments. Raises CalledProcessError."""
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def train(args: Args, run: Path, *command) -> Path:
    """A training run: begun, continued, or done already."""
    program, flags = command[: command.index("--model")], (*LENGTHS, "--precision", args.precision)
    if not (run / "args.json").exists():
        call(*command, *flags, "--output_dir", run)
    elif not (run / "final").exists():
        call(*program, "--resume", run)
    return run


def score(args: Args, base: Path, models: list[Path]) -> list[dict]:
    """The scores of each model; those that are there already are not made again."""
    files = {model: model.with_suffix(".scores.json") for model in models}
    if todo := [model.relative_to(args.folder) for model in files if not files[model].exists()]:
        flags = ("--regime", args.regime, "--folder", args.folder, "--seed", args.seed)
        flags += ("--precision", args.precision)
        call("-m", "real.score", *flags, "--base", base.relative_to(args.folder), "--models", *todo)
    return [json.loads(path.read_text()) for path in files.values()]


def add_row(args: Args, arm: str, run: Path, base: Path, **values) -> None:
    """Append what a run gave, and what it came from, to the rows; once."""
    path, record = args.folder / "fifth.jsonl", read_args(run)
    row = {"regime": args.regime, "arm": arm, "seed": args.seed, **values}
    row |= {"base_hash": model_version(str(base)), "commit": record["git_commit"]}
    names = ("regime", "arm", "seed", "learning_rate", "base_hash")
    rows = [row for _, row in read_rows(str(path))] if path.exists() else []
    if any(all(row.get(name) == old.get(name) for name in names) for old in rows):
        return
    row |= {"versions": record["versions"], "cores": os.cpu_count(), "precision": args.precision}
    row["machine"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


# ---- Stage 0


def make_base(args: Args) -> None:
    """E or W, its gate, and its row."""
    run, data = args.folder / f"{args.regime}-base", args.folder / "data"
    settings = ("--learning_rate", 1e-4, "--train_batch_size", 64, "--max_steps", 47)
    where = ("--model", args.folder / "raw", "--data", data / f"{args.regime}_base.jsonl")
    base = train(args, run, "train_sft.py", *where, *settings) / "final"
    weighted = run / "weighted.jsonl"
    where = ("--data", data / f"{args.regime}_train.jsonl", "--output", weighted)
    flags = ("--num_rollouts", 2, *LENGTHS, "--precision", args.precision)
    call("-m", "prepare.weigh", "--model", base, *where, *flags)
    rows = [row for _, row in read_rows(str(weighted))]
    shares = {weight: n / len(rows) for weight, n in Counter(r["weight"] for r in rows).items()}
    passed = all(shares.get(weight, 0) >= least for weight, least in GATES[args.regime].items())
    kinds = {
        kind: dict(Counter(row["weight"] for row in rows if row["source"] == kind))
        for kind in ("easy", "middle", "addsub", "singleeq", "svamp")
    }
    [scores] = score(args, base, [base])
    if args.regime == "O":
        for name in ("easy_held", "kept_held"):
            counts = scores["counts"][name]
            passed = passed and sum(counts) / len(counts) / SAMPLES >= 0.85
    write_json({"passed": passed, "weights": shares, "by kind": kinds}, run / "gate.json")
    print((run / "gate.json").read_text())
    add_row(args, "base", run, base, gate={"passed": passed, "weights": shares}, **scores)


# ---- The runs


def spent(run: Path, arm: str, seed: int, batch_size: int = BATCH) -> list[dict]:
    """Sums up to each step: trained tokens, those of solutions, sampled and read ones, seconds."""
    settings = read_args(run)["args"]
    lengths = settings["max_length"], settings["max_completion_length"]
    tokenizer = load_tokenizer(settings["model"])
    rows, _ = tokenize_examples(load_examples(settings["data"]), tokenizer, *lengths)
    sums, found = Counter(), []
    for number, (_, metrics) in enumerate(read_rows(str(run / "metrics.jsonl"))):
        queries = [rows[i] for i in batch_indices(len(rows), batch_size, number, seed)]
        weights = {query.id: 1.0 for query in queries}
        if arm in ("B", "C"):
            name = "rollouts" if arm == "B" else "weights"
            logged = run / name / f"step_{number + 1:06d}.jsonl"
            weights = {row["id"]: row["weight"] for _, row in read_rows(str(logged))}
        trained = [query for query in queries if weights[query.id] > 0]
        assert sum(map(len, trained)) == metrics["train_tokens"], "this is another run's batch"
        sums["train_tokens"] += metrics["train_tokens"]
        sums["solution_tokens"] += sum(len(query.completion_ids) for query in trained)
        sums["sampled_tokens"] += metrics.get("rollout_tokens", 0)
        sums["read_tokens"] += sum(len(query.prompt_ids) for query in queries) * (arm == "B")
        sums["seconds"] += sum(v for k, v in metrics.items() if k.endswith("_s"))
        found.append(dict(sums))
    return found


def add_run(args: Args, arm: str, run: Path, base: Path, steps: tuple[int, ...]) -> None:
    """Score a run's checkpoints, and add its row."""
    models = [run / f"checkpoint-{step:06d}" for step in steps]
    sums, points = spent(run, arm, args.seed), []
    for step, scores in zip(steps, score(args, base, models), strict=True):
        points.append({"step": step, **scores, **sums[step - 1]})
    free(run)
    add_row(args, arm, run, base, learning_rate=args.learning_rate, checkpoints=points)


def free(run: Path) -> None:
    """Delete the states of a run's checkpoints, 1.6 GB each, and what has been scored."""
    for path in checkpoints(run).values():
        scored = path.with_suffix(".scores.json").exists()
        shutil.rmtree(path if scored else path / "state", ignore_errors=True)


def run_triple(args: Args, base: Path) -> None:
    """The three arms of a seed, one after another; then their scores in one process."""
    data = ("--data", args.folder / "data" / f"{args.regime}_train.jsonl")
    common = ("--model", base, *data, "--learning_rate", args.learning_rate, "--seed", args.seed)
    common += ("--max_steps", STEPS, "--save_every", 10, "--keep_checkpoints", 10)
    runs = {arm: args.folder / f"{args.regime}-{arm}-{args.seed}" for arm in COUNTED}
    sft = ("--train_batch_size", BATCH)
    arms = {
        "A": ("train_sft.py", *common, *sft),
        "B": ("train_oswft.py", *common, "--rollout_batch_size", BATCH),
        "C": ("-m", "real.yoked", *common, *sft, "--weights_of", runs["B"]),
    }
    for arm, command in arms.items():
        free(train(args, runs[arm], *command))
    models = [runs[arm] / f"checkpoint-{step:06d}" for arm in COUNTED for step in COUNTED[arm]]
    score(args, base, models)
    for arm, steps in COUNTED.items():
        add_run(args, arm, runs[arm], base, steps)


def main(args: Args) -> None:
    base = args.folder / f"{args.regime}-base" / "final"
    if args.stage == "base":
        make_base(args)
    elif args.stage == "rates":
        args.seed = 9
        for args.learning_rate in (5e-5, 2e-5, 1e-5):
            run = args.folder / f"{args.regime}-rate-{args.learning_rate}"
            where = ("--model", base, "--data", args.folder / "data" / f"{args.regime}_train.jsonl")
            flags = ("--learning_rate", args.learning_rate, "--seed", 9, "--max_steps", STEPS)
            train(args, run, "train_sft.py", *where, *flags, "--train_batch_size", BATCH)
            add_run(args, "rate", run, base, (STEPS,))
    else:
        gate = json.loads((base.parent / "gate.json").read_text())
        if not gate["passed"]:
            raise InputError(f"{base}: its gate is not passed")
        run_triple(args, base)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.study", description=__doc__))
