"""Weights for the rows of a Hugging Face Trainer. Copy this file: it needs only torch.

A Trainer fetches all rows of an optimizer step before the first forward pass, in
`get_batch_samples`. There each row gets its weight w = 1 - p̂, in `inputs["weights"]`. What is done
with it is two lines in `compute_loss`: transformers_trainer.py, trl_sft.py.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Query:
    prompt_ids: list[int]
    answer: str | None  # the reference; evaluation needs none


@dataclass
class GenerateWeights:
    """Weighs queries by K answers of transformers' `generate`, which is slow, and needs no vLLM."""

    tokenizer: Any  # of transformers
    verifier: Any  # `score` takes B * K completions and references, and returns verdicts
    num_rollouts: int  # K
    max_completion_length: int  # tokens of an answer
    chunk_size: int = 16  # queries at a time: memory

    @torch.no_grad()
    def __call__(self, model, queries: list[Query], seed: int) -> torch.Tensor:
        """1 - p̂ of each query, (B,), from answers of the model as it is now."""
        torch.manual_seed(seed)
        model.eval()
        texts = []
        for start in range(0, len(queries), self.chunk_size):
            chunk = queries[start : start + self.chunk_size]
            prompts = {"input_ids": [query.prompt_ids for query in chunk]}
            inputs = self.tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
            ids = model.generate(
                **inputs.to(model.device),
                do_sample=True,
                num_return_sequences=self.num_rollouts,
                max_new_tokens=self.max_completion_length,
                **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
            )  # the whole distribution, whatever the model's generation_config.json says
            answers = ids[:, inputs.input_ids.shape[1] :]
            texts += self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        references = [str(query.answer) for query in queries for _ in range(self.num_rollouts)]
        rewards = torch.tensor(self.verifier.score(texts, references)).float()  # (B * K,)
        return 1 - rewards.view(len(queries), -1).mean(dim=1)


@dataclass
class OSWFTCollator:
    """Any collator; its batches also hold the rows' queries."""

    collator: Callable

    def __call__(self, rows: list[dict]) -> dict:
        batch = self.collator([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
        batch["queries"] = []
        for row in rows:
            start = next((i for i, label in enumerate(row["labels"]) if label != -100), None)
            if start is None:  # cut off before its solution begins
                raise ValueError("OSW-FT needs a solution in each row, and one has none")
            batch["queries"].append(Query(list(row["input_ids"][:start]), row.get("answer")))
        return batch


class OSWFTMixin:
    """A mixin, named before a Trainer class: it gives every micro-batch its `weights`.

    Args:
        weigh: from the model, B queries and a seed to (B,) weights. Every rank calls it at the
            same time, with its own queries.
        steps_per_rollout: optimizer steps whose rows are weighed together, S of Theorem 2.

    The data set has the columns input_ids, labels (-100 on the prompt) and answer. Raises
    ValueError for settings that would lose a weight or use a wrong one.
    """

    needs: ClassVar = {
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
        "label_smoothing_factor": 0.0,
    }
    loss_is_scaled_for_ga = True  # all tokens of the step divide it, whatever the accumulation

    def __init__(self, model, args, *rest, weigh: Callable, steps_per_rollout: int = 1, **kwargs):
        for name, value in self.needs.items():
            if getattr(args, name) != value:
                raise ValueError(f"OSW-FT needs {name}={value}")
        if args.n_gpu > 1:
            raise ValueError("OSW-FT needs one process for each GPU: start it with torchrun")
        super().__init__(model, args, *rest, **kwargs)
        self.data_collator = OSWFTCollator(self.data_collator)
        self.weigh, self.steps_per_rollout = weigh, steps_per_rollout

    def train(self, *args, **kwargs):
        self.weighed = []  # micro-batches of the next steps
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor]:
        """The micro-batches of one optimizer step, and how many tokens all ranks learn from."""
        if not self.weighed:
            count = self.steps_per_rollout * num_batches
            self.weighed = list(itertools.islice(epoch_iterator, count))
            queries = [query for batch in self.weighed for query in batch["queries"]]
            if any(query.answer is None or not query.prompt_ids for query in queries):
                raise ValueError("OSW-FT needs a prompt in each row, and a column answer")
            model = self.accelerator.unwrap_model(self.model)
            weights = self.weigh(model, queries, self.args.seed + self.state.global_step)
            weights = torch.as_tensor(weights, dtype=torch.float32, device=device)
            if weights.shape != (len(queries),):
                raise ValueError(f"weigh gave {tuple(weights.shape)}, not ({len(queries)},)")
            self.mean_weight = self.accelerator.gather(weights).mean().item()
            sizes = [len(batch.pop("queries")) for batch in self.weighed]
            for batch, share in zip(self.weighed, weights.split(sizes), strict=True):
                batch["weights"] = share  # (b,)
        batches, self.weighed = self.weighed[:num_batches], self.weighed[num_batches:]
        batches, num_tokens = super().get_batch_samples(iter(batches), num_batches, device)
        if num_tokens is None:
            raise ValueError("for this model the Trainer does not count the tokens of a step")
        return batches, num_tokens

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs:
            logs["mean_weight"] = self.mean_weight  # at the newest rollouts; 1 - pass rate
        super().log(logs, *args, **kwargs)
