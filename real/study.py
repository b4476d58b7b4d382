"""The study of docs/study/plan6.md: its runs, one after another; what was stopped goes on.

    python -m real.model --output runs/sixth/raw
    python -m real.problems --source data/others --output runs/sixth/data
    for regime in S O; do
        python -m real.study --regime $regime --stage base      # the base and its gate
    done
    for seed in 5 6 7 8 9 10 11 12; do
        python -m real.study --regime S --seed $seed            # a triple: A, B, C, then scores
    done
    for seed in 5 6 7 8 9; do
        python -m real.study --regime O --seed $seed
    done

Each run adds a row to runs/sixth/sixth.jsonl, which docs/study/sixth.jsonl is a copy of: so the
commit that a run records stays clean. `--rehearse` takes two steps and four problems of each set.
"""

import itertools
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
    write_rows,
)
from evaluate import model_version
from real.score import SAMPLES, SETS
from run import checkpoints, read_args

import torch
import tyro

ROOT = Path(__file__).parent.parent
LENGTHS = ("--max_length", 512, "--max_completion_length", 96)
BATCH, RATE = 32, 5e-5
ARMS = ("A", "B", "C")
# The least share of each weight over the training rows
GATES = {"S": {0.0: 1 / 4, 1.0: 1 / 4, 0.5: 1 / 8}, "O": {0.0: 1 / 2, 1.0: 1 / 5}}


@dataclass(kw_only=True)
class Args:
    regime: Literal["S", "O"]
    stage: Literal["base", "triple"] = "triple"
    seed: int = 0  # of a triple: order of the data, and sampling
    folder: Path = Path("runs/sixth")  # with raw/ and data/; also gets the rows, sixth.jsonl
    precision: Literal["bf16", "fp32"] = "bf16"  # the plan's; without AVX-512 a step takes minutes
    vllm_memory: float = 0.2  # share of the memory for vLLM; lower, where triples run side by side
    rehearse: bool = False  # two steps, four problems of each set, and no gate; its rows say so

    @property
    def counted(self) -> tuple[int, ...]:
        return (1, 2) if self.rehearse else (50, 60)


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
        flags += ("--precision", args.precision, "--vllm_memory", args.vllm_memory)
        flags += ("--last_step", args.counted[-1], *(("--problems", 4) * args.rehearse))
        call("-m", "real.score", *flags, "--base", base.relative_to(args.folder), "--models", *todo)
    return [json.loads(path.read_text()) for path in files.values()]


def add_row(args: Args, arm: str, run: Path, base: Path, **values) -> None:
    """Append what a run gave, and what it came from, to the rows; once."""
    path, record = args.folder / "sixth.jsonl", read_args(run)
    row = {"regime": args.regime, "arm": arm, "seed": args.seed, **values}
    row |= {"base_hash": model_version(str(base)), "commit": record["git_commit"]}
    rows = [row for _, row in read_rows(str(path))] if path.exists() else []
    names = ("regime", "arm", "seed", "base_hash")
    if any(all(row[name] == old[name] for name in names) for old in rows):
        return
    row |= {"versions": record["versions"], "cores": os.cpu_count(), "precision": args.precision}
    row["machine"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        row["machine"] = torch.cuda.get_device_name()
    row |= {"rehearsal": True} if args.rehearse else {}
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


# ---- The base


def make_base(args: Args) -> None:
    """E or W, its gate, and its row."""
    run, data = args.folder / f"{args.regime}-base", args.folder / "data"
    settings = ("--learning_rate", 1e-4, "--train_batch_size", 64)
    settings += ("--max_steps", 2 if args.rehearse else 47)
    where = ("--model", args.folder / "raw", "--data", data / f"{args.regime}_base.jsonl")
    base = train(args, run, "train_sft.py", *where, *settings) / "final"
    asked, weighted = data / f"{args.regime}_train.jsonl", run / "weighted.jsonl"
    if args.rehearse:
        few = itertools.islice(read_rows(str(asked)), 4)
        write_rows((row for _, row in few), asked := run / "few.jsonl")
    where = ("--data", asked, "--output", weighted)
    flags = ("--num_rollouts", 2, *LENGTHS, "--precision", args.precision)
    flags += ("--vllm_memory", args.vllm_memory)
    call("-m", "prepare.weigh", "--model", base, *where, *flags)
    rows = [row for _, row in read_rows(str(weighted))]
    shares = {weight: n / len(rows) for weight, n in Counter(r["weight"] for r in rows).items()}
    passed = all(shares.get(weight, 0) >= least for weight, least in GATES[args.regime].items())
    kinds = {
        kind: dict(Counter(row["weight"] for row in rows if row["source"] == kind))
        for kind in sorted({row["source"] for row in rows})
    }
    [scores] = score(args, base, [base])
    if args.regime == "O":  # sampled at T = 1, as in the fifth study
        for name in SETS["O"]:
            counts = scores["whole"][name]
            passed = passed and sum(counts) / len(counts) / SAMPLES >= 0.85
    write_json({"passed": passed, "weights": shares, "by kind": kinds}, run / "gate.json")
    print((run / "gate.json").read_text())
    add_row(args, "base", run, base, gate={"passed": passed, "weights": shares}, **scores)


# ---- The runs


def spent(run: Path, arm: str, seed: int) -> list[dict]:
    """Sums up to each step: trained tokens, those of solutions, sampled and read ones, seconds."""
    settings = read_args(run)["args"]
    lengths = settings["max_length"], settings["max_completion_length"]
    tokenizer = load_tokenizer(settings["model"])
    rows, _ = tokenize_examples(load_examples(settings["data"]), tokenizer, *lengths)
    sums, found = Counter(), []
    for number, (_, metrics) in enumerate(read_rows(str(run / "metrics.jsonl"))):
        queries = [rows[i] for i in batch_indices(len(rows), BATCH, number, seed)]
        weights = {query.id: 1.0 for query in queries}
        if arm in ("B", "C"):
            name = "rollouts" if arm == "B" else "weights"
            logged = run / name / f"step_{number + 1:06d}.jsonl"
            weights = {row["id"]: row["weight"] for _, row in read_rows(str(logged))}
        trained = [query for query in queries if weights[query.id] > 0]
        assert sum(map(len, trained)) == metrics["train_tokens"], "this is another run's batch"
        sums["train_tokens"] += metrics["train_tokens"]
        sums["solution_tokens"] += sum(len(query.response_ids) for query in trained)
        sums["sampled_tokens"] += metrics.get("rollout_tokens", 0)
        sums["read_tokens"] += sum(len(query.prompt_ids) for query in queries) * (arm == "B")
        sums["seconds"] += sum(v for k, v in metrics.items() if k.endswith("_s"))
        found.append(dict(sums))
    return found


def free(run: Path) -> None:
    """Delete the states of a run's checkpoints, 1.6 GB each, and what has been scored."""
    for path in checkpoints(run).values():
        scored = path.with_suffix(".scores.json").exists()
        shutil.rmtree(path if scored else path / "state", ignore_errors=True)


def run_triple(args: Args, base: Path) -> None:
    """The three arms of a seed, one after another; then their scores in one process, and rows."""
    data = ("--data", args.folder / "data" / f"{args.regime}_train.jsonl")
    common = ("--model", base, *data, "--learning_rate", RATE, "--seed", args.seed)
    common += ("--max_steps", args.counted[-1], "--save_every", 1 if args.rehearse else 10)
    common += ("--keep_checkpoints", 10)
    runs = {arm: args.folder / f"{args.regime}-{arm}-{args.seed}" for arm in ARMS}
    sft, sampled = ("--train_batch_size", BATCH), ("--vllm_memory", args.vllm_memory)
    arms = {
        "A": ("train_sft.py", *common, *sft),
        "B": ("train_oswft.py", *common, "--rollout_batch_size", BATCH, *sampled),
        "C": ("-m", "real.yoked", *common, *sft, "--weights_of", runs["B"]),
    }
    for arm, command in arms.items():
        free(train(args, runs[arm], *command))
    names = [f"checkpoint-{step:06d}" for step in args.counted]
    score(args, base, [run / name for run in runs.values() for name in names])
    for arm, run in runs.items():
        found = score(args, base, [run / name for name in names])  # read again
        sums, points = spent(run, arm, args.seed), []
        for step, scores in zip(args.counted, found, strict=True):
            points.append({"step": step, **scores, **sums[step - 1]})
        free(run)
        add_row(args, arm, run, base, learning_rate=RATE, checkpoints=points)


def main(args: Args) -> None:
    base = args.folder / f"{args.regime}-base" / "final"
    if args.stage == "base":
        make_base(args)
    elif json.loads((base.parent / "gate.json").read_text())["passed"] or args.rehearse:
        run_triple(args, base)
    else:
        raise InputError(f"{base}: its gate is not passed")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.study", description=__doc__))
