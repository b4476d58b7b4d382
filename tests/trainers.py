"""Run by test_trainers.py: the recipes' gradients next to a dense reference.

At every optimizer step, before the update, each parameter's gradient is compared with that of one
process that takes a row at a time, in double precision.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from demo.tiny import make_tokenizer
from engine import gather
from gradients import dense_oswft_loss, make_model, make_rows
from recipes.transformers_trainer import OSWFTTrainer
from recipes.trl_sft import WeightedSFTTrainer

import torch
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig

CALLS, LIMIT = 2, 1e-5  # to weigh, in a run; relative error of a gradient
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Case:
    trainer: type
    batch: int
    accumulation: int
    steps_per_rollout: int = 1
    gradient_checkpointing: bool = False
    padding_free: bool = False


class Comparison(TrainerCallback):
    """The dense gradient at every step, from the rows and weights that `weigh` handed out."""

    def __init__(self, case: Case, rows: list, weights: torch.Tensor):
        self.case, self.rows, self.weights = case, rows, weights
        self.calls, self.errors = [], []  # ids of a call to weigh; relative errors

    def weigh(self, model, queries, seed):
        ids = [int(query.answer) for query in queries]
        assert [self.rows[i].prompt_ids for i in ids] == [query.prompt_ids for query in queries]
        assert len(self.errors) == len(self.calls) * self.case.steps_per_rollout  # before step 1
        self.calls.append(ids)
        return self.weights[ids]

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        size = self.case.batch * self.case.accumulation
        call, part = divmod(state.global_step, self.case.steps_per_rollout)
        ids = self.calls[call][part * size : (part + 1) * size]
        if WORLD_SIZE > 1:
            ids = gather(ids)
        assert len(set(ids)) == size * WORLD_SIZE
        rows = [self.rows[i] for i in ids]
        model = getattr(model, "module", model)  # without DDP
        dense = Qwen3ForCausalLM(model.config).double()  # no copy: TRL replaces `forward`
        dense.load_state_dict(model.state_dict())
        tokens = sum(len(row.completion_ids) for row in rows)
        dense_oswft_loss(dense, rows, self.weights[ids], tokens).backward()
        ours = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        theirs = torch.cat([p.grad.flatten() for p in dense.parameters()])
        self.errors.append(((ours - theirs).norm() / theirs.norm()).item())


def make_trainer(case: Case, folder: str, rows: list, weigh: Callable, **options) -> Trainer:
    """A trainer of a small model in `folder`; `options` replace or add settings."""
    tokenizer = make_tokenizer()
    model = make_model(pad_token_id=tokenizer.pad_token_id)  # as the Trainer would set it, too late
    trl = case.trainer is WeightedSFTTrainer
    if trl:
        options = {"max_length": None, "padding_free": case.padding_free, **options}
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.gradient_checkpointing,
        "max_steps": CALLS * case.steps_per_rollout,
        "max_grad_norm": 0.0,  # gradients stay as they are
        **{"remove_unused_columns": False, "bf16": False, "use_cpu": True},
        **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, **options},
    }
    columns = {
        "input_ids": [row.prompt_ids + row.completion_ids for row in rows],
        "labels": [[-100] * len(row.prompt_ids) + row.completion_ids for row in rows],
        "answer": [str(i) for i in range(len(rows))],
    }
    return case.trainer(
        model,
        (SFTConfig if trl else TrainingArguments)(**settings),
        weigh=weigh,
        steps_per_rollout=case.steps_per_rollout,
        train_dataset=Dataset.from_dict(columns),
        data_collator=None if trl else DataCollatorForSeq2Seq(tokenizer),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        processing_class=tokenizer,
    )


def largest_error(case: Case) -> float:
    """Of the gradients of a few steps, relative to the dense ones."""
    steps = CALLS * case.steps_per_rollout
    count = case.batch * case.accumulation * WORLD_SIZE * steps
    rows = make_rows(torch.Generator().manual_seed(0), count)
    weights = torch.randint(3, (count,), generator=torch.Generator().manual_seed(1)) / 2
    comparison = Comparison(case, rows, weights)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, folder, rows, comparison.weigh)
        trainer.add_callback(comparison)
        trainer.train()
    assert (len(comparison.errors), len(comparison.calls)) == (steps, CALLS)
    return max(comparison.errors)


def compare() -> None:
    """Raises if a gradient differs."""
    for trainer in (OSWFTTrainer, WeightedSFTTrainer):
        cases = [Case(trainer, *split) for split in ((8, 1), (4, 2), (2, 4))]
        cases += [Case(trainer, 3, 2, steps_per_rollout=2, gradient_checkpointing=True)]
        if trainer is WeightedSFTTrainer:
            cases += [Case(trainer, 4, 2, steps_per_rollout=2, padding_free=True)]
        for case in cases:
            error = largest_error(case)
            assert error <= LIMIT, (error, case)


if __name__ == "__main__":
    compare()
