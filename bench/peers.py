"""TRL's trainers, for bench.sft and bench.step to measure next to ours.

Each function returns one that trains for an epoch, and returns what `bench.setup.run_steps` does.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from bench.setup import BATCH, MAX_TOKENS
from data import TokenizedExample, load_tokenizer
from run import Stopwatch
from train_oswft import oswft_weights
from verify import Verifier

SETTINGS = {"num_train_epochs": 1, "learning_rate": 1e-12}  # so small that the model hardly moves
SETTINGS |= {"bf16": False, "gradient_checkpointing": False, "remove_unused_columns": False}
SETTINGS |= {"output_dir": "runs/bench/trl", "save_strategy": "no"}
SETTINGS |= {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
WHOLE_DISTRIBUTION = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
Measure = Callable[[], dict[str, float]]


class Clock(Stopwatch, TrainerCallback):
    """Seconds of an epoch by phase, and the tokens that were sampled."""

    def on_epoch_begin(self, *_, **__) -> None:
        self.tokens = 0
        self.lap(None)

    def on_step_end(self, *_, **__) -> None:
        self.lap("train_s")

    def verify(self, verifier: Verifier, texts: list, answers: list, num_tokens: int) -> list[bool]:
        """Check what was sampled."""
        self.lap("rollout_s")
        self.tokens += num_tokens
        verdicts = verifier.score(texts, answers)
        self.lap("verify_s")
        return verdicts


def epochs(trainer_class: type, config, model: Path, columns: dict, clock: Clock, **own) -> Measure:
    """Measures epochs of a trainer on rows with these columns; `own` are its own arguments."""
    import datasets

    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(model),
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=load_tokenizer(str(model)),
        callbacks=[clock],
        **own,
    )

    def measure() -> dict[str, float]:
        trainer.train()
        steps = trainer.state.global_step
        totals = {**clock.read(), "rollout_tokens": clock.tokens}
        return {name: total / steps for name, total in totals.items()}

    return measure


def solutions(rows: Sequence[TokenizedExample]) -> dict[str, list]:
    """Columns of what SFT learns."""
    return {
        "input_ids": [[*row.prompt_ids, *row.completion_ids] for row in rows],
        "labels": [[-100] * len(row.prompt_ids) + [*row.completion_ids] for row in rows],
    }


def sft(model: Path, rows: Sequence[TokenizedExample], micro_batch: int, order: str) -> Measure:
    """SFTTrainer; `order` is its train_sampling_strategy."""
    import trl

    config = trl.SFTConfig(
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=BATCH // micro_batch,
        train_sampling_strategy=order,
        max_length=None,
        **SETTINGS,
    )
    return epochs(trl.SFTTrainer, config, model, solutions(rows), Clock())


def oswft(model: Path, rows: Sequence[TokenizedExample]) -> Measure:
    """recipes/trl_sft.py with K = 2, sampling by transformers' `generate`, all at once."""
    import trl

    from recipes.trl_sft import WeightedSFTTrainer

    tokenizer, clock, verifier = load_tokenizer(str(model)), Clock(), Verifier(num_workers=2)

    @torch.no_grad()
    def weigh(model, queries: list, seed: int) -> torch.Tensor:
        model.eval()
        prompts = {"input_ids": [query.prompt_ids for query in queries]}
        inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        sampling = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": MAX_TOKENS}
        ids = model.generate(**inputs, **sampling, **WHOLE_DISTRIBUTION)
        ids = ids[:, inputs.input_ids.shape[1] :]  # (B * K, T)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        num_tokens = (ids != tokenizer.pad_token_id).sum().item()
        answers = [query.answer for query in queries for _ in range(2)]
        verdicts = clock.verify(verifier, texts, answers, num_tokens)
        return oswft_weights(torch.tensor(verdicts).view(-1, 2))

    columns = {**solutions(rows), "answer": [row.example.answer for row in rows]}
    config = trl.SFTConfig(per_device_train_batch_size=BATCH, max_length=None, **SETTINGS)
    return epochs(WeightedSFTTrainer, config, model, columns, clock, weigh=weigh)


def grpo(model: Path, rows: Sequence[TokenizedExample]) -> Measure:
    """GRPOTrainer with G = 8, sampling by transformers' `generate`, all at once."""
    import trl

    tokenizer, clock, verifier = load_tokenizer(str(model)), Clock(), Verifier(num_workers=2)

    def reward(completions: list, completion_ids: list, answer: list, **_) -> list[float]:
        num_tokens = sum(map(len, completion_ids))
        return list(map(float, clock.verify(verifier, completions, answer, num_tokens)))

    columns = {
        "prompt": [tokenizer.decode(row.prompt_ids) for row in rows],
        "answer": [row.example.answer for row in rows],
    }
    config = trl.GRPOConfig(
        per_device_train_batch_size=256,
        gradient_accumulation_steps=BATCH * 8 // 256,
        num_generations=8,
        max_completion_length=MAX_TOKENS,
        **SETTINGS,
    )
    return epochs(trl.GRPOTrainer, config, model, columns, clock, reward_funcs=reward)
