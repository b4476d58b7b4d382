"""The optimizer step of train_sft.py next to TRL's SFTTrainer: python -m bench.sft"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from bench.measure import (
    Ratio,
    goal,
    markdown_table,
    print_section,
    ratio,
    spread,
    take_turns,
    timed,
)
from bench.setup import (
    BASE,
    BATCH,
    COLD,
    load_rows,
    run_steps,
    small_model,
    tiny_base,
    write_mixed,
)
from data import TokenizedExample, load_tokenizer, write_rows
from engine import keep_freed_memory, share_cores
from run import Run

# Of all of TRL's trainers. The learning rate is so small that the model hardly moves.
SETTINGS = {"num_train_epochs": 1, "learning_rate": 1e-12, "remove_unused_columns": False}
SETTINGS |= {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
SETTINGS |= {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
SETTINGS |= {"output_dir": tempfile.gettempdir()}  # nothing is saved


class Clock(TrainerCallback):
    """Seconds of an epoch of one of TRL's trainers by phase, and the tokens that it samples."""

    lap = Run.lap  # of `seconds` and `last_lap`

    def on_epoch_begin(self, *_, **__) -> None:
        self.tokens, self.seconds, self.last_lap = 0, {}, time.perf_counter()

    def on_sampled(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        self.lap("rollout_s")

    def on_step_end(self, *_, **__) -> None:
        self.lap("train_s")

    def measure(self, trainer_class: type, model: Path, columns: dict[str, list], **arguments):
        """A function that trains for an epoch on these columns, and returns what run_steps does."""
        trainer = trainer_class(
            AutoModelForCausalLM.from_pretrained(model),
            train_dataset=Dataset.from_dict(columns),
            processing_class=load_tokenizer(str(model)),
            callbacks=[self],
            **arguments,
        )

        def epoch(seed: int) -> dict[str, float]:
            trainer.args.seed = seed
            transformers.set_seed(seed)
            trainer.train()
            totals = {**self.seconds, "rollout_tokens": self.tokens}
            return {name: total / trainer.state.global_step for name, total in totals.items()}

        return epoch


def solutions(rows: list[TokenizedExample]) -> dict[str, list]:
    """Columns of what SFT learns."""
    return {
        "input_ids": [[*row.prompt_ids, *row.completion_ids] for row in rows],
        "labels": [[-100] * len(row.prompt_ids) + [*row.completion_ids] for row in rows],
    }


def plain_loop(model: Path, rows: list[TokenizedExample], at_once: int, steps: int) -> float:
    """Tokens/s of steps as one would write them, transformers' loss and all; rows of one length."""
    learner = AutoModelForCausalLM.from_pretrained(model)
    adam = torch.optim.AdamW(learner.parameters(), lr=1e-12, weight_decay=0.0, fused=True)
    columns = [torch.tensor(column) for column in solutions(rows).values()]

    def step() -> None:
        for ids, labels in zip(*(column.split(at_once) for column in columns), strict=True):
            loss = learner(input_ids=ids, labels=labels, use_cache=False).loss
            (loss * len(ids) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    seconds = [timed(step) for _ in range(COLD + steps)]
    return sum(map(len, rows)) / mean(seconds[COLD:])


def small_rows(length: int, repetitions: int, steps: int) -> tuple[list[list], Ratio]:
    """Tokens/s of the small model on rows of one length; a table's rows, ours ÷ the plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        model, data = small_model(Path(folder, "model")), Path(folder, "rows.jsonl")
        solution = "8" * (length - 32)  # after a prompt of 31 tokens, before the end of turn
        row = {"question": "7" * 20, "solution": solution, "answer": "8", "source": "bench"}
        write_rows([{"id": f"{n}"} | row for n in range(8)], data)
        rows = load_rows(model, data, length)
        sizes = {"train_batch_size": 8, "max_length": length}
        sizes["max_tokens_per_micro_batch"] = 4 * length

        def ours() -> float:
            turn = run_steps("train_sft.py", model, data, steps, **sizes)
            return turn["train_tokens"] / turn["train_s"]

        def plain(first: Callable | None = None) -> float:  # in a new process, as ours is
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=first) as pool:
                return pool.submit(plain_loop, model, rows, 4, steps).result()

        calls = {"`train_sft.py`": ours, "a plain loop": plain}
        calls["a plain loop that keeps freed memory, as ours does"] = partial(
            plain, keep_freed_memory
        )
        measured = take_turns(calls, repetitions)
    ours, plain, _ = measured.values()
    table = [[name, spread(r), ratio(ours, r)] for name, r in measured.items()]
    return table, ratio(ours, plain)


def main(base: Path = BASE, repetitions: int = 5, steps: int = 6, length: int = 512) -> list[str]:
    """Measure with the tiny model in `base`, then with one of 29M parameters; returns Markdown.

    Args:
        steps: of a turn; at most 4 for the other model.
        length: tokens of a row, for the other one.
    """
    share_cores()
    model = tiny_base(base) / "model"
    with tempfile.TemporaryDirectory() as folder:
        data = write_mixed(Path(folder, "rows.jsonl"), BATCH * steps, 80, 440)
        rows = load_rows(model, data, 512)
        ours = partial(run_steps, "train_sft.py", model, data, steps, max_length=512)
        calls = {"`train_sft.py`": ours}
        for at_once, order in (128, "random"), (32, "random"), (32, "group_by_length"):
            sizes = {"per_device_train_batch_size": at_once, "train_sampling_strategy": order}
            sizes["gradient_accumulation_steps"] = BATCH // at_once
            config = trl.SFTConfig(max_length=None, **sizes, **SETTINGS)
            epoch = Clock().measure(trl.SFTTrainer, model, solutions(rows), args=config)
            calls[f"TRL, {at_once} rows at once, {order}"] = epoch
        measured = take_turns(calls, repetitions, seeded=True)
    tokens = sum(map(len, rows)) / steps  # of a step, padding not counted
    rates = {
        name: [turn.get("train_tokens", tokens) / turn["train_s"] for turn in turns]
        for name, turns in measured.items()
    }
    ours, *others = rates.values()
    small, against_plain = small_rows(length, repetitions, min(steps, 4))
    table = [[name, spread(r), ratio(ours, r)] for name, r in rates.items()]
    return [
        f"Tiny model (0.4M parameters), fp32, one rank, {BATCH} rows to an optimizer step, padding "
        "not counted; prompts of 16 to 48 tokens, solutions log-normal about 80, at most 440.",
        markdown_table(["", "tokens/s", "ours is faster by"], table),
        goal("`train_sft.py`", "TRL's fastest", min(ratio(ours, r) for r in others), "≥ 1.4"),
        f"A random model of 29M parameters, 8 rows of {length} tokens to a step, 4 to a pass; the "
        "plain loop has transformers' loss and torch's fused AdamW.",
        markdown_table(["", "tokens/s", "ours is faster by"], small),
        goal("`train_sft.py`, 29M", "a plain torch loop", against_plain, "≥ 0.97"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
