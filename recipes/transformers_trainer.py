"""OSW-FT inside transformers' Trainer. trl_sft.py is the same for TRL's SFTTrainer.

A Trainer fetches all rows of an optimizer step before the first forward pass, in
`get_batch_samples`. There each row gets its weight w = 1 - p̂; `compute_loss` then multiplies and
divides as Algorithm 1 does. The obvious other places are wrong: `compute_loss_func` never sees the
rows' weights, and a weighted *mean* would divide by the sum of the weights, which cancels the
method (recipes/codebases.md).

    python -m recipes.transformers_trainer --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl \
        --output_dir runs/trainer --bf16 True --gradient_checkpointing True
    torchrun --nproc_per_node 8 -m recipes.transformers_trainer ...     # several GPUs, by DDP

The arguments are those of TrainingArguments, and the few below. Copy `OSWFTCollator`, `OSWFTMixin`,
`OSWFTTrainer`, and the two functions of train_oswft.py; `RolloutWeights` can be any function that
samples and grades. Not here: sharded weights (ZeRO-3, FSDP), which vLLM cannot take as they are.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import datasets
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from data import derive_seed, load_examples
from engine import gather, gather_rewards
from prompts import load_tokenizer, stop_token_ids, tokenize_examples
from rollout import Rollout
from train_oswft import oswft_loss, oswft_weights
from verify import Verifier


@dataclass(frozen=True)
class Query:
    prompt_ids: list[int]
    answer: str  # the reference


@dataclass
class OSWFTCollator:
    """Any collator; its batches also hold the rows' queries."""

    collator: Callable

    def __call__(self, rows: list[dict]) -> dict:
        batch = self.collator([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
        batch["queries"] = []
        for row in rows:
            start = next(i for i, label in enumerate(row["labels"]) if label != -100)
            batch["queries"].append(Query(list(row["input_ids"][:start]), row["answer"]))
        return batch


class OSWFTMixin:
    """Before a Trainer in the list of base classes: gives every micro-batch its `weights`, (b,).

    Args:
        weigh: from the model, queries and a seed to one weight per query, (B,). Every rank calls it
            at the same time, with as many queries.
        steps_per_rollout: optimizer steps whose rows are weighed together, S of Theorem 2.

    The data set needs the columns input_ids, labels (-100 on the prompt) and answer. Raises
    ValueError for settings under which weights would be lost or wrong.
    """

    needs: ClassVar = {"remove_unused_columns": False, "average_tokens_across_devices": True}
    loss_is_scaled_for_ga = True  # divided by all tokens of the step already

    def __init__(self, *args, weigh: Callable, steps_per_rollout: int = 1, **kwargs):
        super().__init__(*args, **kwargs)
        for name, value in self.needs.items():
            if getattr(self.args, name) != value:
                raise ValueError(f"OSW-FT needs {name}={value}")
        if self.args.n_gpu > 1:
            raise ValueError("one process per GPU, please: start it with torchrun")
        self.data_collator = OSWFTCollator(self.data_collator)
        self.weigh, self.steps_per_rollout = weigh, steps_per_rollout

    def train(self, *args, **kwargs):
        self.weighed = []  # micro-batches of the next steps
        return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """The micro-batches of one optimizer step, and how many tokens are learnt from."""
        if not self.weighed:
            count = self.steps_per_rollout * num_batches
            self.weighed = list(itertools.islice(epoch_iterator, count))
            queries = [query for batch in self.weighed for query in batch["queries"]]
            seed = derive_seed(self.args.seed, self.state.global_step)
            weights = self.weigh(self.accelerator.unwrap_model(self.model), queries, seed).to(
                device
            )
            self.mean_weight = self.accelerator.gather(weights).mean().item()
            sizes = [len(batch.pop("queries")) for batch in self.weighed]
            for batch, share in zip(self.weighed, weights.split(sizes), strict=True):
                batch["weights"] = share
        batches, self.weighed = self.weighed[:num_batches], self.weighed[num_batches:]
        batches, num_tokens = super().get_batch_samples(iter(batches), num_batches, device)
        if num_tokens is None:
            raise ValueError("for this model the Trainer does not count the tokens of a step")
        return batches, num_tokens

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs:
            logs["mean_weight"] = self.mean_weight  # of the newest rollouts; 1 - pass rate
        super().log(logs, *args, **kwargs)


class OSWFTTrainer(OSWFTMixin, Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """This micro-batch's part of Algorithm 1's loss; without weights, as in evaluation, SFT."""
        inputs.pop("queries", None)
        if "weights" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        weights, targets = inputs.pop("weights"), inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].float()  # (b, T, vocabulary)
        logprobs = -cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # (b, T)
        loss = oswft_loss(logprobs, targets != -100, weights, num_items_in_batch)
        return loss * self.accelerator.num_processes  # the ranks' gradients are averaged


@dataclass
class RolloutWeights:
    """Weighs by K answers that vLLM samples from the current weights, in this process."""

    rollout: Rollout
    verifier: Verifier
    num_rollouts: int = 2  # K
    max_completion_length: int = 4096

    def __call__(self, model: PreTrainedModel, queries: list[Query], seed: int) -> torch.Tensor:
        first = sum(gather([len(queries)])[: dist.get_rank()])
        mine, queries = slice(first, first + len(queries)), gather(queries)  # those of all ranks
        self.rollout.load_weights((n, p.detach()) for n, p in model.named_parameters())
        completions = self.rollout.generate(
            [query.prompt_ids for query in queries],
            num_samples=self.num_rollouts,
            max_tokens=self.max_completion_length,
            seeds=[derive_seed(seed, index) for index in range(len(queries))],
        )  # this rank's share
        self.rollout.sleep()
        answers = [queries[completion.query].answer for completion in completions]
        verdicts = self.verifier.score([completion.text for completion in completions], answers)
        _, rewards = gather_rewards(completions, verdicts, len(queries))  # (B, K)
        return oswft_weights(rewards)[mine]


@dataclass(kw_only=True)
class OSWFTArguments:
    """Fields for a dataclass that also inherits the Trainer's own; the defaults are the paper's."""

    model: str  # hub id or folder
    data: str  # JSONL or hub id with question, solution, answer
    num_rollouts: int = 2  # K, answers sampled per query
    steps_per_rollout: int = 1  # optimizer steps whose queries are weighed together
    max_sequence_length: int = 5120  # tokens of prompt and solution, or of prompt and rollout
    max_completion_length: int = 4096  # of a rollout
    vllm_memory: float = 0.3  # share of a GPU's memory
    verifier_workers: int = 2  # processes that grade

    learning_rate: float = 1e-5
    lr_scheduler_type: str = "constant"
    num_train_epochs: float = 1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 16  # times 8 on one GPU: 128 queries
    remove_unused_columns: bool = False
    report_to: str = "none"


def load(args: OSWFTArguments) -> tuple:
    """Tokenizer, examples that fit, model, and a Rollout: what both recipes begin with."""
    tokenizer = load_tokenizer(args.model)
    lengths = (args.max_sequence_length, args.max_completion_length)
    examples, _ = tokenize_examples(load_examples(args.data), tokenizer, *lengths)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.generation_config.eos_token_id = stop_token_ids(tokenizer)  # for who samples from it
    rollout = Rollout(
        args.model,
        tokenizer,
        max_length=args.max_sequence_length,
        precision="bf16" if args.bf16 else "fp32",
        memory_share=args.vllm_memory,
        sleep=True,
    )
    return tokenizer, examples, model, rollout


@dataclass(kw_only=True)
class Args(OSWFTArguments, TrainingArguments):
    pass


def main(args: Args) -> None:
    tokenizer, examples, model, rollout = load(args)
    rows = [
        {
            "input_ids": row.prompt_ids + row.completion_ids,
            "labels": [-100] * len(row.prompt_ids) + row.completion_ids,
            "answer": row.example.answer,
        }
        for row in examples
    ]
    with Verifier(args.verifier_workers) as verifier:
        trainer = OSWFTTrainer(
            model,
            args,
            weigh=RolloutWeights(rollout, verifier, args.num_rollouts, args.max_completion_length),
            steps_per_rollout=args.steps_per_rollout,
            train_dataset=datasets.Dataset.from_list(rows),
            data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads input_ids and labels
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main(HfArgumentParser(Args).parse_args_into_dataclasses()[0])
