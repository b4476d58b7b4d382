"""Whole steps of SFT, OSW-FT (K=2) and GRPO (G=8) next to TRL's trainers: python -m bench.step"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import trl
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig

import train_oswft
from bench.measure import goal, markdown_table, print_section, ratio, spread, take_turns
from bench.setup import (
    BASE,
    BATCH,
    COLD,
    MAX_TOKENS,
    PHASES,
    load_rows,
    run_steps,
    small_model,
    tiny_base,
    write_mixed,
)
from bench.sft import SETTINGS, Clock, solutions
from data import TokenizedExample, batch_indices, derive_seed, load_tokenizer, stop_token_ids
from engine import init_ranks, share_cores
from recipes.trl_sft import WeightedSFTTrainer
from rollout import Rollout
from train_oswft import oswft_weights
from verify import Verifier

BLOCKS = {"num_blocks": 512, "max_batch_tokens": 256}  # a cache of the default size is far slower


@dataclass(frozen=True)
class Size:
    """What a step is measured on; ours and TRL's get the same."""

    model: Path
    data: Path
    queries: int
    max_length: int
    max_tokens: int  # of an answer
    at_once: tuple[int, int]  # rows to a pass of TRL's update, SFT and GRPO: the fastest of some
    reward: str | None = None

    def verifier(self) -> Verifier:
        return Verifier(num_workers=2, reward=self.reward)

    def references(self, rows: list[TokenizedExample]) -> list:
        """What the verifier reads of each row."""
        return [row.example.columns if self.reward else row.example.answer for row in rows]

    def ours(self, script: str, steps: int) -> Callable:
        """Measures one of our scripts."""
        flags = {"max_length": self.max_length, "train_batch_size": self.queries}
        if script != "train_sft.py":
            flags |= {"rollout_batch_size": self.queries, "max_completion_length": self.max_tokens}
            flags |= {"reward": self.reward} if self.reward else {}
        return partial(run_steps, script, self.model, self.data, steps, **flags)


# ---- TRL's trainers. A way to sample takes a model, prompts, how many answers to each, a seed. ---


def by_generate(
    model, prompts: list[list[int]], options: GenerationConfig, seed: int
) -> list[list[int]]:
    """transformers' `generate`, all at once, until the last answer has ended."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    rows = [torch.as_tensor(prompt) for prompt in prompts]
    ids = pad(rows, padding_value=options.pad_token_id)  # (B, T)
    mask = pad([torch.ones_like(row) for row in rows])
    found = model.generate(ids, attention_mask=mask, generation_config=options)[:, ids.shape[1] :]
    return [[id for id in row if id != options.pad_token_id] for row in found.tolist()]


def by_blocks(
    model, prompts: list[list[int]], options: GenerationConfig, seed: int
) -> list[list[int]]:
    """transformers' continuous batching: a new answer begins where one has ended."""
    config = ContinuousBatchingConfig(**BLOCKS)
    prompts = [[*map(int, prompt)] for prompt in prompts]
    found = model.generate_batch(prompts, options, config, progress_bar=False)
    return [answer.generated_tokens for answer in found.values()]


def by_vllm(size: Size, rows: list[TokenizedExample]) -> Callable:
    """vLLM in this process, as rollout.py sets it up; its answers are about as long as ours."""
    init_ranks("gloo")
    args = train_oswft.Args(model=str(size.model), data="", precision="fp32")
    rollout = Rollout(args, load_tokenizer(str(size.model)), size.max_length)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # of this process, not of the runs it starts
        del os.environ[name]

    def sample(
        model, prompts: list[list[int]], options: GenerationConfig, seed: int
    ) -> list[list[int]]:
        rollout.load_weights((name, p.detach()) for name, p in model.named_parameters())
        order = batch_indices(len(rows), len(prompts), COLD, seed)  # of our step that is measured
        seeds = [derive_seed(seed, COLD, n, rows[i].id) for n, i in enumerate(order)]
        n, most = options.num_return_sequences, options.max_new_tokens
        return [answer.token_ids for answer in rollout.generate(prompts, n, most, seeds)]

    return sample


def trl_oswft(size: Size, rows: list[TokenizedExample], sample: Callable) -> Callable:
    """Measures recipes/trl_sft.py with K = 2."""
    tokenizer, clock, verifier = load_tokenizer(str(size.model)), Clock(), size.verifier()
    options = GenerationConfig(
        do_sample=True,
        top_k=0,
        num_return_sequences=2,
        max_new_tokens=size.max_tokens,
        eos_token_id=stop_token_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )

    @torch.no_grad()
    def weigh(model, queries: list, seed: int) -> torch.Tensor:
        model.eval()
        prompts = [query.prompt_ids for query in queries]
        answers = sample(model, prompts, options, seed)  # (B * K)
        clock.on_sampled(sum(map(len, answers)))
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        verdicts = verifier.score(texts, [query.answer for query in queries for _ in range(2)])
        clock.lap("verify_s")
        return oswft_weights(torch.tensor(verdicts).view(-1, 2))

    columns = {**solutions(rows), "answer": size.references(rows)}
    sizes = {"per_device_train_batch_size": size.at_once[0], "max_length": None}
    sizes |= {"gradient_accumulation_steps": size.queries // size.at_once[0]}
    config = trl.SFTConfig(**sizes, **SETTINGS)
    return clock.measure(WeightedSFTTrainer, size.model, columns, args=config, weigh=weigh)


def trl_grpo(size: Size, rows: list[TokenizedExample], **sampling) -> Callable:
    """Measures TRL's GRPOTrainer with G = 8."""
    tokenizer, clock, verifier = load_tokenizer(str(size.model)), Clock(), size.verifier()

    def reward(completions: list, completion_ids: list, answer: list, **_) -> list[float]:
        clock.on_sampled(sum(map(len, completion_ids)))
        verdicts = verifier.score(completions, answer)
        clock.lap("verify_s")
        return [float(verdict) for verdict in verdicts]

    prompts = [tokenizer.decode(row.prompt_ids) for row in rows]
    columns = {"prompt": prompts, "answer": size.references(rows)}
    sizes = {"per_device_train_batch_size": size.at_once[1], "num_generations": 8}
    sizes |= {"gradient_accumulation_steps": size.queries * 8 // size.at_once[1]}
    config = trl.GRPOConfig(
        **sizes, **sampling, max_completion_length=size.max_tokens, top_k=0, **SETTINGS
    )
    return clock.measure(trl.GRPOTrainer, size.model, columns, args=config, reward_funcs=reward)


# ---- The two sizes -------------------------------------------------------------------------------


def tabulate(measured: dict[str, list]) -> tuple[str, list[list[float]]]:
    """A table of seconds by phase, and each case's seconds of a step by turn."""
    table, whole = [], []
    for name, turns in measured.items():
        seconds = [median(turn.get(phase, 0) for turn in turns) for phase in PHASES]
        whole.append([sum(turn.get(phase, 0) for phase in PHASES) for turn in turns])
        tokens = [turn["rollout_tokens"] for turn in turns]
        row = [name, *(f"{s:.3f} ({s / sum(seconds):.0%})" for s in seconds)]
        table.append([*row, spread(whole[-1], ".3f"), spread(tokens)])
    return markdown_table(["s a step (share)", *PHASES, "step", "tokens sampled"], table), whole


def tiny_section(base: Path, repetitions: int, steps: int) -> list[str]:
    model, data = tiny_base(base) / "model", base / "train.jsonl"
    size = Size(model, data, BATCH, 128, MAX_TOKENS, (128, 256))
    rows = load_rows(model, data, size.max_length)[: BATCH * steps]
    calls = {
        "SFT": size.ours("train_sft.py", steps),
        "OSW-FT": size.ours("train_oswft.py", steps),
        "GRPO": size.ours("train_grpo.py", steps),
        "TRL's SFTTrainer, our weights, `generate`": trl_oswft(size, rows, by_generate),
        "TRL's GRPOTrainer, `generate`": trl_grpo(size, rows),
    }
    measured = take_turns(calls, repetitions, seeded=True)
    table, (_, oswft, grpo, by_trl, grpo_by_trl) = tabulate(measured)
    alike = "none: answers of 25 tokens, all alike, from 0.4M parameters"
    return [
        f"The demo's model and data, {BATCH} queries, fp32, one rank with all cores; the model is "
        "the base, before fine-tuning. Its answers have about 25 tokens, all alike: `generate` "
        "wastes nothing on those that have ended, and a step of vLLM's scheduler costs more than "
        "one of the model. Our `Verifier` checks all. Only ours writes down what it samples, and "
        "compares vLLM's log-probabilities with its own; this is in verify_s.",
        table,
        goal("OSW-FT's step, s", "GRPO's", ratio(oswft, grpo), "≤ 0.35"),
        goal("OSW-FT's steps/s, tiny", "TRL + `generate`", ratio(by_trl, oswft), alike),
        goal("GRPO's steps/s, tiny", "TRL + `generate`", ratio(grpo_by_trl, grpo), alike),
    ]


def small_section(folder: Path, repetitions: int, grpo_repetitions: int) -> list[str]:
    model, data = small_model(folder / "model"), write_mixed(folder / "rows.jsonl", 32, 128, 512)
    size = Size(model, data, 32, 640, 512, (8, 16), "bench/coin.py:coin")
    rows = load_rows(model, data, size.max_length)
    blocks = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": BLOCKS,
    }
    oswft_calls = {
        "OSW-FT": size.ours("train_oswft.py", 1),
        "TRL's SFTTrainer, our weights, vLLM": trl_oswft(size, rows, by_vllm(size, rows)),
        "TRL's SFTTrainer, our weights, continuous batching": trl_oswft(size, rows, by_blocks),
        "TRL's SFTTrainer, our weights, `generate`": trl_oswft(size, rows, by_generate),
    }
    grpo_calls = {
        "GRPO": size.ours("train_grpo.py", 1),
        "TRL's GRPOTrainer, continuous batching": trl_grpo(size, rows, **blocks),
        "TRL's GRPOTrainer, `generate`": trl_grpo(size, rows),
    }
    measured = take_turns(oswft_calls, repetitions, seeded=True)
    measured |= take_turns(grpo_calls, grpo_repetitions, warm_up=0, seeded=True)
    table, whole = tabulate(measured)
    oswft, vllm, by_cb, by_trl, grpo, grpo_by_cb, grpo_by_trl = whole
    return [
        "A random Qwen3 of 29M parameters and 8,192 ids, fp32, 32 queries. An answer ends after "
        "each token with a chance of 1/128, or at 512 tokens; solutions have log-normal lengths "
        "about 128; a reward function says right at a rate of 0.7. TRL's vLLM is set up as in "
        "`rollout.py`, with the seeds of our step: its own does not run in one process on a CPU. "
        "GRPO's first turn counts, too, where TRL's step is a new trainer's first.",
        table,
        goal("OSW-FT's steps/s, 29M", "TRL + `generate`", ratio(by_trl, oswft), "≥ 6"),
        goal("OSW-FT's steps/s, 29M", "TRL + vLLM", ratio(vllm, oswft), "≥ 1.2"),
        goal("OSW-FT's steps/s, 29M", "TRL + continuous batching", ratio(by_cb, oswft), "none"),
        goal("GRPO's steps/s, 29M", "TRL + `generate`", ratio(grpo_by_trl, grpo), "≥ 6"),
        goal("GRPO's steps/s, 29M", "TRL + continuous batching", ratio(grpo_by_cb, grpo), "none"),
    ]


def main(
    base: Path = BASE,
    repetitions: int = 5,
    steps: int = 4,
    small_repetitions: int = 5,
    grpo_repetitions: int = 2,
) -> list[str]:
    """Measure with the tiny model in `base`, then with one of 29M parameters; returns Markdown.

    Args:
        steps: of a turn, for the tiny model.
        small_repetitions: turns of OSW-FT with the other one; 5 minutes for one.
        grpo_repetitions: turns of GRPO with it; 20 minutes for one.
    """
    share_cores()
    sections = tiny_section(base, repetitions, steps)
    if small_repetitions:
        with tempfile.TemporaryDirectory() as folder:
            sections += small_section(Path(folder), small_repetitions, grpo_repetitions)
    return sections


if __name__ == "__main__":
    print_section(main, __doc__)
