"""The study of docs/study/plan7.md: its runs, one after another; what was stopped goes on.

    python -m prepare.real_model --output runs/sixth/raw
    python -m real.problems --source data/others --output runs/sixth/data
    python -m real.study --stage base          # the base and its gate
    for seed in 5 6 7 8 9 10 11 12; do
        python -m real.study --seed $seed      # a triple: A, B, C, then scores
    done

Each run adds a row to runs/sixth/sixth.jsonl, which docs/study/sixth.jsonl is a copy of: so the
commit that a run records stays clean. `--rehearse` takes two steps and four problems of each set.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arguments import one_line_errors
from data import InputError, read_rows, write_json, write_rows
from run import checkpoints, model_version, read_args

import torch
import tyro

ROOT = Path(__file__).parent.parent
SHARED = ("--max_length", 512, "--max_completion_length", 96, "--precision", "fp32")
SAMPLED = ("--vllm_memory", 0.2)
BATCH, RATE = 32, 5e-5
ARMS = ("A", "B", "C")
GATE = {0.0: 1 / 4, 1.0: 1 / 4, 0.5: 1 / 8}  # the least share of each weight over the training rows


@dataclass(kw_only=True)
class Args:
    stage: Literal["base", "triple"] = "triple"
    seed: int = 0  # of a triple: order of the data, and sampling
    folder: Path = Path("runs/sixth")  # with raw/ and data/; also gets the rows, sixth.jsonl
    rehearse: bool = False  # two steps, four problems of each set, and no gate; its rows say so

    @property
    def counted(self) -> tuple[int, ...]:
        return (1, 2) if self.rehearse else (50, 60)


def call(*command) -> None:
    """Run Python with these arguments. Raises CalledProcessError."""
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def train(run: Path, *command) -> Path:
    """A training run: begun, continued, or done already."""
    if not (run / "args.json").exists():
        call(*command, *SHARED, "--output_dir", run)
    elif not (run / "final").exists():
        call(*command[: command.index("--model")], "--resume", run)
    return run


def score(args: Args, base: Path, models: list[Path]) -> list[dict]:
    """The scores of each model; those that are there already are not made again."""
    files = {model: model.with_suffix(".scores.json") for model in models}
    if todo := [model.relative_to(args.folder) for model in files if not files[model].exists()]:
        flags = ("--folder", args.folder, "--seed", args.seed, "--last_step", args.counted[-1])
        flags += ("--problems", 4) * args.rehearse
        call("-m", "real.score", *flags, "--base", base.relative_to(args.folder), "--models", *todo)
    return [json.loads(path.read_text()) for path in files.values()]


def add_row(args: Args, arm: str, run: Path, base: Path, **values) -> None:
    """Append what a run gave, and what it came from, to the rows; once."""
    path, record = args.folder / "sixth.jsonl", read_args(run)
    row = {"arm": arm, "seed": args.seed, **values}
    row |= {"base_hash": model_version(str(base)), "commit": record["git_commit"]}
    rows = [row for _, row in read_rows(str(path))] if path.exists() else []
    if any(all(row[name] == old[name] for name in ("arm", "seed", "base_hash")) for old in rows):
        return
    row |= {"versions": record["versions"], "cores": os.cpu_count(), "precision": "fp32"}
    processor = re.search(r"(?m)^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text())
    capability = torch.backends.cpu.get_cpu_capability()
    row["machine"] = f"{processor[1] if processor else 'unknown'}, {capability}"
    row |= {"rehearsal": True} if args.rehearse else {}
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


# ---- The base


def make_base(args: Args) -> None:
    """E, its gate, and its row."""
    run, data = args.folder / "base", args.folder / "data"
    settings = ("--learning_rate", 1e-4, "--train_batch_size", 64)
    settings += ("--max_steps", 2 if args.rehearse else 47)
    where = ("--model", args.folder / "raw", "--data", data / "base.jsonl")
    base = train(run, "train_sft.py", *where, *settings) / "final"
    asked, weighted = data / "train.jsonl", run / "weighted.jsonl"
    if args.rehearse:
        few = itertools.islice(read_rows(str(asked)), 4)
        write_rows((row for _, row in few), asked := run / "few.jsonl")
    where = ("--data", asked, "--output", weighted, "--num_rollouts", 2)
    call("-m", "prepare.weigh", "--model", base, *where, *SHARED, *SAMPLED)
    rows = [row for _, row in read_rows(str(weighted))]
    shares = {weight: n / len(rows) for weight, n in Counter(r["weight"] for r in rows).items()}
    passed = all(shares.get(weight, 0) >= least for weight, least in GATE.items())
    write_json({"passed": passed, "weights": shares}, run / "gate.json")
    print((run / "gate.json").read_text())
    [scores] = score(args, base, [base])
    free(run)
    add_row(args, "base", run, base, gate={"passed": passed, "weights": shares}, **scores)


# ---- The runs


def spent(run: Path) -> dict[int, dict]:
    """Sums up to each step: tokens trained on, tokens sampled, seconds."""
    sums, found = Counter(), {}
    for _, row in read_rows(str(run / "metrics.jsonl")):
        sums["train_tokens"] += row["train_tokens"]
        sums["sampled_tokens"] += row.get("rollout_tokens", 0)
        sums["seconds"] += sum(v for k, v in row.items() if k.endswith("_s"))
        found[row["step"]] = dict(sums)
    return found


def free(run: Path) -> None:
    """Delete the states of a run's checkpoints, 1.6 GB each, and the models that are scored."""
    for path in checkpoints(run).values():
        if path.is_dir():
            scored = path.with_suffix(".scores.json").exists()
            shutil.rmtree(path if scored else path / "state", ignore_errors=True)


def run_triple(args: Args, base: Path) -> None:
    """The three arms of a seed, one after another; then their scores in one process, and rows."""
    data = ("--data", args.folder / "data" / "train.jsonl")
    common = ("--model", base, *data, "--learning_rate", RATE, "--seed", args.seed)
    common += ("--max_steps", args.counted[-1], "--save_every", 1 if args.rehearse else 10)
    runs = {arm: args.folder / f"{arm}-{args.seed}" for arm in ARMS}
    batch = ("--train_batch_size", BATCH)
    arms = {
        "A": ("train_sft.py", *common, *batch),
        "B": ("train_oswft.py", *common, "--rollout_batch_size", BATCH, *SAMPLED),
        "C": ("-m", "paper.yoked", *common, *batch, "--weights_of", runs["B"]),
    }
    names = [f"checkpoint-{step:06d}" for step in args.counted]  # the newest two, which are kept
    for arm, command in arms.items():
        train(runs[arm], *command)
    score(args, base, [run / name for run in runs.values() for name in names])
    for arm, run in runs.items():
        found = score(args, base, [run / name for name in names])  # read again
        sums = spent(run)
        points = [
            {"step": step, **scores, **sums[step]}
            for step, scores in zip(args.counted, found, strict=True)
        ]
        add_row(args, arm, run, base, learning_rate=RATE, checkpoints=points)
        free(run)


def main(args: Args) -> None:
    base = args.folder / "base" / "final"
    if args.stage == "base":
        make_base(args)
    elif json.loads((base.parent / "gate.json").read_text())["passed"] or args.rehearse:
        run_triple(args, base)
    else:
        raise InputError(f"{base}: its gate is not passed")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.study", description=__doc__))
