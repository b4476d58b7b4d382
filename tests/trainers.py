"""Run by test_trainers.py through torchrun: the recipes' gradients beside a dense reference.

At every optimizer step, before the update, each parameter's gradient is compared with that of one
process that takes a row at a time, in double precision.
"""

import itertools
import os
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig

from demo.tiny import make_tokenizer
from gradients import dense_oswft_loss, make_rows
from recipes.transformers_trainer import OSWFTTrainer
from recipes.trl_sft import WeightedSFTTrainer

STEPS, LIMIT = 4, 1e-5  # relative error of a gradient
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


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
            shares = [None] * WORLD_SIZE
            dist.all_gather_object(shares, ids)
            ids = list(itertools.chain(*shares))
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


def run(case: Case) -> float:
    """Train a few steps; returns the largest relative error of a gradient."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    count = case.batch * case.accumulation * WORLD_SIZE * STEPS
    rows = make_rows(torch.Generator().manual_seed(0), count)
    weights = torch.randint(3, (count,), generator=torch.Generator().manual_seed(1)) / 2
    comparison = Comparison(case, rows, weights)
    dataset = Dataset.from_dict(
        {
            "input_ids": [row.prompt_ids + row.completion_ids for row in rows],
            "labels": [[-100] * len(row.prompt_ids) + row.completion_ids for row in rows],
            "answer": [str(i) for i in range(count)],
        }
    )
    options = {"max_length": None, "padding_free": case.padding_free}
    config = SFTConfig if case.trainer is WeightedSFTTrainer else TrainingArguments
    collator = {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = case.trainer(
            model,
            config(
                output_dir=folder,
                per_device_train_batch_size=case.batch,
                gradient_accumulation_steps=case.accumulation,
                gradient_checkpointing=case.gradient_checkpointing,
                remove_unused_columns=False,
                max_steps=STEPS,
                max_grad_norm=0.0,  # gradients stay as they are
                bf16=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **(options if config is SFTConfig else {}),
            ),
            weigh=comparison.weigh,
            steps_per_rollout=case.steps_per_rollout,
            train_dataset=dataset,
            callbacks=[comparison],
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
            processing_class=tokenizer,
            **(collator if config is TrainingArguments else {}),
        )
        trainer.train()
    assert len(comparison.errors) == STEPS
    assert len(comparison.calls) == STEPS // case.steps_per_rollout
    return max(comparison.errors)


def main() -> None:
    cases = []
    for trainer in (OSWFTTrainer, WeightedSFTTrainer):
        for batch, accumulation in ((8, 1), (4, 2), (2, 4), (3, 2)):
            cases += [Case(trainer, batch, accumulation, s) for s in (1, 2)]
        cases += [Case(trainer, 4, 2, gradient_checkpointing=True)]
    cases += [Case(WeightedSFTTrainer, 4, 2, s, padding_free=True) for s in (1, 2)]
    for case in cases:
        error = run(case)
        print(f"{error:.1e}", case, flush=True)
        assert error <= LIMIT, case


if __name__ == "__main__":
    main()
