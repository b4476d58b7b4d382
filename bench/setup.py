"""What is measured: the demo's tiny model, random rows, a training step of each method."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import train_grpo
import train_oswft
import train_sft
from data import Example, TokenizedExample, load_examples, load_tokenizer, tokenize_examples
from engine import Engine, gather_rewards, init_distributed, load_engine
from rollout import CHECKED_QUERIES, Rollout, trajectories
from run import Stopwatch
from verify import Verifier

BASE = Path("runs/bench/base")  # the demo's tiny model and its data


def tiny_base(base: Path) -> Path:
    """The folder of the demo's tiny model and its data; made if it is not there."""
    if not (base / "heldout").is_dir():
        command = [sys.executable, "-m", "demo.tiny", "make", "--output_dir", str(base)]
        subprocess.run(command, check=True)
    return base


def tiny_examples(base: Path) -> tuple[PreTrainedTokenizerBase, list[TokenizedExample]]:
    """The tiny model's tokenizer and its training examples."""
    tokenizer = load_tokenizer(str(tiny_base(base) / "model"))
    examples = load_examples(str(base / "train.jsonl"))
    return tokenizer, tokenize_examples(examples, tokenizer, 128, 48)[0]


def random_rows(
    lengths: list[tuple[int, int]], vocabulary: range, seed: int = 0
) -> list[TokenizedExample]:
    """Rows of random tokens with the given lengths of prompt and completion."""
    rng = np.random.default_rng(seed)
    example = Example("-", "-", "-", "7", "bench")

    def ids(count: int) -> list[int]:
        return rng.integers(vocabulary.start, vocabulary.stop, count).tolist()

    return [
        TokenizedExample(str(n), ids(prompt), ids(completion), example)
        for n, (prompt, completion) in enumerate(lengths)
    ]


class Setup(NamedTuple):
    """What a training script holds in its loop."""

    engine: Engine
    rollout: Rollout
    verifier: Verifier


def make_setup(model: Path, max_length: int, num_workers: int = 2) -> Setup:
    """Engine, vLLM and verifier, as a training script makes them. The model hardly moves."""
    if not dist.is_initialized():  # bench.scaling makes several
        init_distributed()
    args = train_oswft.Args(model=str(model), data="", precision="fp32", learning_rate=1e-12)
    args.max_length = max_length
    engine = load_engine(args)
    rollout = Rollout(args, load_tokenizer(args.model), max_length)
    return Setup(engine, rollout, Verifier(num_workers))


@contextlib.contextmanager
def training_setup(model: Path, max_length: int, num_workers: int = 2) -> Iterator[Setup]:
    """A setup whose verifier ends with the block."""
    setup = make_setup(model, max_length, num_workers)
    with setup.verifier:
        yield setup


def training_step(
    method: str,
    setup: Setup,
    queries: list[TokenizedExample],
    num_rollouts: int,
    max_tokens: int,
    weights: torch.Tensor | None = None,
) -> dict[str, float]:
    """Seconds by phase of one step of "sft", "oswft" or "grpo", as its training script takes it.

    Args:
        weights: (B,) in place of OSW-FT's own.
    """
    engine, rollout, verifier = setup
    clock = Stopwatch()
    if method == "sft":
        train_sft.update(engine, queries, train_sft.Args(model="", data=""))
        clock.lap("train")
        return clock.read()
    rollout.load_weights(engine.named_weights())
    clock.lap("sync")
    prompts, seeds = [query.prompt_ids for query in queries], list(range(len(queries)))
    completions = rollout.generate(
        prompts, num_rollouts, max_tokens, seeds, logprobs=CHECKED_QUERIES
    )
    clock.lap("rollout")
    references = [queries[completion.query].example.answer for completion in completions]
    verdicts = verifier.score([completion.text for completion in completions], references)
    completions, rewards = gather_rewards(completions, verdicts, len(queries))
    clock.lap("verify")
    common = {"model": "", "data": "", "num_rollouts": num_rollouts}
    if method == "oswft":
        weights = train_oswft.oswft_weights(rewards) if weights is None else weights
        train_oswft.update(engine, queries, weights, train_oswft.Args(**common))
    else:
        advantages = train_grpo.grpo_advantages(rewards).flatten()
        answers = trajectories(queries, completions)
        train_grpo.update(engine, answers, advantages, None, train_grpo.Args(**common))
    clock.lap("train")
    return clock.read()
