"""The optimizer step of train_sft.py next to TRL's SFTTrainer: python -m bench.sft"""

import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import BASE, BATCH, load_rows, run_steps, tiny_base
from data import TokenizedExample, load_tokenizer, write_rows
from engine import share_cores
from run import Stopwatch

# Of all of TRL's trainers. The learning rate is so small that the model hardly moves.
SETTINGS = {"num_train_epochs": 1, "learning_rate": 1e-12, "remove_unused_columns": False}
SETTINGS |= {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
SETTINGS |= {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
SETTINGS |= {"output_dir": "runs/bench/trl"}


class Clock(Stopwatch, TrainerCallback):
    """Seconds of an epoch of one of TRL's trainers by phase, and the tokens that it samples."""

    def on_epoch_begin(self, *_, **__) -> None:
        self.tokens = 0
        self.lap(None)

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

        def epoch() -> dict[str, float]:
            trainer.train()
            totals = {**self.read(), "rollout_tokens": self.tokens}
            return {name: total / trainer.state.global_step for name, total in totals.items()}

        return epoch


def solutions(rows: list[TokenizedExample]) -> dict[str, list]:
    """Columns of what SFT learns."""
    return {
        "input_ids": [[*row.prompt_ids, *row.completion_ids] for row in rows],
        "labels": [[-100] * len(row.prompt_ids) + [*row.completion_ids] for row in rows],
    }


def write_mixed(path: Path, count: int) -> None:
    """Write rows whose lengths vary as real ones do; the template adds 11 tokens to a question."""
    rng = np.random.default_rng(0)
    questions = rng.integers(5, 38, count)
    solutions = np.minimum(rng.lognormal(np.log(80), 0.8, count).astype(int) + 1, 440)
    rows = (
        {"id": f"{n}", "question": "7" * q, "solution": "8" * s, "answer": "8", "source": "bench"}
        for n, (q, s) in enumerate(zip(questions, solutions, strict=True))
    )
    write_rows(rows, path)


def main(base: Path = BASE, repetitions: int = 5, steps: int = 6) -> list[str]:
    """Measure with the tiny model in `base`; a turn has so many steps. Returns Markdown."""
    share_cores()
    model = tiny_base(base) / "model"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_mixed(data, BATCH * steps)
        rows = load_rows(model, data, 512)
        calls = {"`train_sft.py`": partial(run_steps, "train_sft.py", model, data, 512, steps)}
        for at_once, order in (128, "random"), (32, "random"), (32, "group_by_length"):
            sizes = {"per_device_train_batch_size": at_once, "train_sampling_strategy": order}
            sizes["gradient_accumulation_steps"] = BATCH // at_once
            config = trl.SFTConfig(max_length=None, **sizes, **SETTINGS)
            epoch = Clock().measure(trl.SFTTrainer, model, solutions(rows), args=config)
            calls[f"TRL, {at_once} rows at once, {order}"] = epoch
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
