"""How OSW-FT's step grows with K, length, batch, vocabulary, ranks: python -m bench.scaling"""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3ForCausalLM

from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import Setup, random_rows, training_setup, training_step
from data import stop_token_ids
from demo.tiny import make_config, make_tokenizer, save_model

PROMPT, LENGTH, BATCH, MAX_LENGTH = 24, 48, 32, 256
VOCABULARY = 2048  # × 1, the tokens that the model knows
CASES = {  # by label: an argument of scaling_step, and its values
    "K = ": ("num_rollouts", (1, 2, 4, 8)),
    "length ×": ("longer", (1, 2, 4)),
    "batch ×": ("larger", (1, 2, 4)),
}


def write_endless_model(folder: Path, vocabulary: int = 64) -> Path:
    """Write a random tiny model that never stops: a completion has the length asked for."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": MAX_LENGTH, "initializer_range": 0.02}
    sizes |= {"tie_word_embeddings": False, "vocab_size": vocabulary}
    model = Qwen3ForCausalLM(make_config(tokenizer, **sizes))
    with torch.no_grad():
        model.get_input_embeddings().weight += 1  # a direction that all hidden states share,
        model.lm_head.weight[stop_token_ids(tokenizer)] = -1  # and that speaks against stopping
    save_model(model, tokenizer, folder)
    return folder


def scaling_step(setup: Setup, num_rollouts: int = 2, longer: int = 1, larger: int = 1) -> float:
    """Seconds of a step of OSW-FT in which every completion and solution has the same length."""
    queries = random_rows([(PROMPT, LENGTH * longer)] * BATCH * larger, range(8, 18))
    return sum(training_step("oswft", setup, queries, num_rollouts, LENGTH * longer).values())


@contextlib.contextmanager
def launched_ranks(model: Path, ranks: int, threads: int) -> Iterator[Callable[[], float]]:
    """Start ranks, each with so many threads; what is yielded asks for the seconds of a step."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(ranks)]
    with socket.create_server(("", 0)) as free:
        command += ["--master_port", str(free.getsockname()[1])]
    command += ["--module", "bench.one_rank", "--model", str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def step() -> float:
            print(file=process.stdin, flush=True)
            for line in process.stdout:
                if found := re.match(r"seconds ([\d.]+)", line):
                    return float(found[1])
            sys.exit(f"error: {shlex.join(command)} failed")

        yield step  # at the end of `with` stdin is closed, and the ranks end


def main(repetitions: int = 5) -> list[str]:
    """Measure; returns Markdown."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_endless_model(Path(folder) / "64")
        alone, both = "ranks ×1, 1 thread", "ranks ×2, 1 thread each"
        threads = f"threads ×{cores}, 1 rank"
        ranks = {alone: (1, 1), both: (2, 1), threads: (1, cores)}
        if torch.cuda.device_count() == 1:
            del ranks[both]  # NCCL lets no two ranks share a GPU
        with contextlib.ExitStack() as launched:
            steps = {
                name: launched.enter_context(launched_ranks(model, *shape))
                for name, shape in ranks.items()
            }
            by_ranks = take_turns(steps, repetitions)
        setup = stack.enter_context(training_setup(model, MAX_LENGTH))
        calls = {
            (label, factor): partial(scaling_step, setup, **{argument: factor})
            for label, (argument, factors) in CASES.items()
            for factor in factors
        }
        for factor in (1, 4, 16):
            model = write_endless_model(Path(folder) / str(factor), VOCABULARY * factor)
            setup = stack.enter_context(training_setup(model, MAX_LENGTH))
            calls["vocabulary ×", factor] = partial(scaling_step, setup)
        measured = take_turns(calls, repetitions)
    rows, worst = [], 0.0
    for (label, factor), seconds in measured.items():
        growth = ratio(seconds, measured[label, 1])
        worst = max(worst, growth / factor) if factor > 1 else worst
        rows.append([f"{label}{factor}", f"{median(seconds):.3f}", f"{growth:.2f}", factor])
    rank_rows = []
    for (name, (count, cores_each)), seconds in zip(ranks.items(), by_ranks.values(), strict=True):
        used, faster = count * cores_each, ratio(by_ranks[alone], seconds)
        row = [name, f"{median(seconds):.3f}", f"{faster:.2f}", f"{used / faster:.2f}", used]
        rank_rows.append(row)
    two_ranks = "Two ranks are left out: they cannot share one GPU."
    if both in ranks:
        what = "2 ranks ÷ 1 rank on the same cores, seconds"
        two_ranks = goal(what, ratio(by_ranks[both], by_ranks[threads]), "≤ 1")
    return [
        f"A random tiny model that never stops: {BATCH} queries, prompts of {PROMPT} tokens, "
        f"completions and solutions of {LENGTH}, K = 2, a vocabulary of 64, fp32, every weight 1. "
        f"Where the vocabulary grows, from {VOCABULARY:,}.",
        "![How much more each of these costs, by how much larger it is](docs/growth.svg)",
        markdown_table(["", "s a step", "grown by", "linear"], rows),
        goal("the worst growth ÷ linear", worst, "≤ 1"),
        f"The same with {4 * BATCH} queries, through the launcher; core-seconds are what grows:",
        markdown_table(["", "s a step", "faster by", "core-seconds grown by", "linear"], rank_rows),
        two_ranks,
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
