"""A step of SFT, OSW-FT (K=2) and GRPO (G=8), and of TRL's trainers: python -m bench.step"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import trl

from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import BASE, BATCH, MAX_TOKENS, PHASES, load_rows, run_steps, tiny_base
from bench.sft import SETTINGS, Clock, solutions
from data import TokenizedExample, load_tokenizer
from engine import share_cores
from recipes.trl_sft import WeightedSFTTrainer
from train_oswft import oswft_weights
from verify import Verifier

SCRIPTS = {"SFT": "train_sft.py", "OSW-FT": "train_oswft.py", "GRPO": "train_grpo.py"}
MAX_LENGTH = 128


def trl_oswft(model: Path, rows: list[TokenizedExample]) -> Callable:
    """Measures recipes/trl_sft.py with K = 2, which samples here by transformers' `generate`."""
    tokenizer, clock, verifier = load_tokenizer(str(model)), Clock(), Verifier(num_workers=2)

    @torch.no_grad()
    def weigh(model, queries: list, seed: int) -> torch.Tensor:
        model.eval()
        prompts = {"input_ids": [query.prompt_ids for query in queries]}
        inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        sampling = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": MAX_TOKENS}
        ids = model.generate(**inputs, **sampling, top_k=0)[:, inputs.input_ids.shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)  # (B * K), of ids (B * K, T)
        clock.on_sampled((ids != tokenizer.pad_token_id).sum().item())
        verdicts = verifier.score(texts, [query.answer for query in queries for _ in range(2)])
        clock.lap("verify_s")
        return oswft_weights(torch.tensor(verdicts).view(-1, 2))

    columns = {**solutions(rows), "answer": [row.example.answer for row in rows]}
    config = trl.SFTConfig(per_device_train_batch_size=BATCH, max_length=None, **SETTINGS)
    return clock.measure(WeightedSFTTrainer, model, columns, args=config, weigh=weigh)


def trl_grpo(model: Path, rows: list[TokenizedExample]) -> Callable:
    """Measures TRL's GRPOTrainer with G = 8, which samples by transformers' `generate`."""
    tokenizer, clock, verifier = load_tokenizer(str(model)), Clock(), Verifier(num_workers=2)

    def reward(completions: list, completion_ids: list, answer: list, **_) -> list[float]:
        clock.on_sampled(sum(map(len, completion_ids)))
        verdicts = verifier.score(completions, answer)
        clock.lap("verify_s")
        return [float(verdict) for verdict in verdicts]

    prompts = [tokenizer.decode(row.prompt_ids) for row in rows]
    columns = {"prompt": prompts, "answer": [row.example.answer for row in rows]}
    sizes = {"per_device_train_batch_size": 256, "gradient_accumulation_steps": BATCH * 8 // 256}
    sizes |= {"num_generations": 8, "max_completion_length": MAX_TOKENS}
    config = trl.GRPOConfig(**sizes, **SETTINGS)
    return clock.measure(trl.GRPOTrainer, model, columns, args=config, reward_funcs=reward)


def main(base: Path = BASE, repetitions: int = 5, steps: int = 4) -> list[str]:
    """Measure with the tiny model in `base`; a turn has so many steps. Returns Markdown."""
    share_cores()
    model, data, calls = tiny_base(base) / "model", base / "train.jsonl", {}
    rows = load_rows(model, data, MAX_LENGTH)[: BATCH * steps]
    for name, script in SCRIPTS.items():
        calls[name] = partial(run_steps, script, model, data, MAX_LENGTH, steps)
    calls["TRL's SFTTrainer with our weights"] = trl_oswft(model, rows)
    calls["TRL's GRPOTrainer"] = trl_grpo(model, rows)
    measured = take_turns(calls, repetitions)
    table, whole = [], []
    for name, turns in measured.items():
        seconds = [median(turn.get(phase, 0) for turn in turns) for phase in PHASES]
        whole.append([sum(turn.get(phase, 0) for phase in PHASES) for turn in turns])
        tokens = median(turn["rollout_tokens"] for turn in turns)
        row = [name, *(f"{s:.3f} ({s / sum(seconds):.0%})" for s in seconds)]
        table.append([*row, f"{median(whole[-1]):.3f}", f"{tokens:,.0f}"])
    _, oswft, grpo, by_trl, grpo_by_trl = whole
    return [
        f"The demo's model and data, {BATCH} queries, fp32, one rank with all cores; OSW-FT with "
        "K = 2, GRPO with G = 8; the model is the base, before fine-tuning. TRL samples by "
        "`generate`, at its fastest settings of those tried: all rows at once, and 128 (SFT) and "
        "256 (GRPO) to a pass of an update. Our `Verifier` checks all. Only ours writes down what "
        "it samples, and compares vLLM's log-probabilities with its own; this is in verify_s.",
        markdown_table(["s a step (share)", *PHASES, "step", "tokens sampled"], table),
        goal("OSW-FT's step ÷ GRPO's", ratio(oswft, grpo), "≤ 0.35"),
        goal("TRL's SFTTrainer, s a step ÷ ours", ratio(by_trl, oswft), "≥ 3"),
        goal("TRL's GRPOTrainer, s a step ÷ ours", ratio(grpo_by_trl, grpo), "≥ 3"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
