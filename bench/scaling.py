"""How OSW-FT's step grows with K, length, batch, and ranks: python -m bench.scaling"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3ForCausalLM

from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import Setup, random_rows, training_setup, training_step
from demo.tiny import make_config, make_tokenizer, save_model
from prompts import stop_token_ids
from ranks import free_port

PROMPT, LENGTH, BATCH, MAX_LENGTH = 24, 48, 32, 256
CASES = {  # by label: an argument of scaling_step, and its values
    "K = ": ("num_rollouts", (1, 2, 4, 8)),
    "length ×": ("longer", (1, 2, 4)),
    "batch ×": ("larger", (1, 2, 4)),
}


def write_endless_model(folder: Path) -> None:
    """Write a random tiny model that never stops: a completion has the length asked for."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": MAX_LENGTH, "initializer_range": 0.02}
    model = Qwen3ForCausalLM(make_config(tokenizer, tie_word_embeddings=False, **sizes))
    with torch.no_grad():
        model.get_input_embeddings().weight += 1  # a direction that all hidden states share,
        model.lm_head.weight[stop_token_ids(tokenizer)] = -1  # and that speaks against stopping
    save_model(model, tokenizer, folder)


def scaling_step(setup: Setup, num_rollouts: int = 2, longer: int = 1, larger: int = 1) -> float:
    """Seconds of a step of OSW-FT in which every completion and solution has the same length."""
    queries = random_rows([(PROMPT, LENGTH * longer)] * BATCH * larger, range(8, 18))
    return sum(training_step("oswft", setup, queries, num_rollouts, LENGTH * longer).values())


def launch_ranks(model: Path, ranks: int, threads: int) -> float:
    """Seconds of a step over so many ranks, each with so many threads (see one_rank.py)."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(ranks)]
    command += ["--master_port", free_port(), "--module", "bench.one_rank", "--model", str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = re.search(r"seconds ([\d.]+)", result.stdout)
    if result.returncode or not found:
        sys.exit(f"error: {shlex.join(command)} failed:\n{result.stderr[-2000:]}")
    return float(found[1])


def main(repetitions: int = 5) -> list[str]:
    """Measure; returns Markdown."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_endless_model(model)
        ranks = {
            "1 rank, 1 thread": partial(launch_ranks, model, 1, 1),
            "2 ranks, 1 thread each": partial(launch_ranks, model, 2, 1),
            f"1 rank, {cores} threads": partial(launch_ranks, model, 1, cores),
        }
        if torch.cuda.device_count() == 1:  # NCCL lets no two ranks share a GPU
            del ranks["2 ranks, 1 thread each"]
        by_ranks = take_turns(ranks, repetitions, warm_up=0)
        with training_setup(model, MAX_LENGTH) as setup:
            calls = {
                (label, factor): partial(scaling_step, setup, **{argument: factor})
                for label, (argument, factors) in CASES.items()
                for factor in factors
            }
            measured = take_turns(calls, repetitions)
    rows, worst = [], 0.0
    for (label, factor), seconds in measured.items():
        growth = ratio(seconds, measured[label, 1])
        worst = max(worst, growth / factor) if factor > 1 else worst
        rows.append([f"{label}{factor}", f"{median(seconds):.3f}", f"{growth:.2f}", factor])
    alone, *both, threads = by_ranks.values()
    two_ranks = "Two ranks: skipped, since they cannot share one GPU."
    if both:
        what = "2 ranks ÷ 1 rank on the same cores, seconds"
        two_ranks = goal(what, ratio(*both, threads), "≤ 1")
    rank_rows = [[n, f"{median(s):.3f}", f"{ratio(alone, s):.2f}"] for n, s in by_ranks.items()]
    return [
        f"A random tiny model that never stops: {BATCH} queries, prompts of {PROMPT} tokens, "
        f"completions and solutions of {LENGTH}, K = 2, fp32, every weight 1.",
        markdown_table(["", "s a step", "grown by", "linear"], rows),
        goal("the worst growth ÷ linear", worst, "≤ 1"),
        f"The same with {4 * BATCH} queries, through the launcher:",
        markdown_table(["", "s a step", "faster than one thread by"], rank_rows),
        two_ranks,
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
