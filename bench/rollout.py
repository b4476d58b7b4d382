"""Tokens/s through rollout.py next to the bare LLM.generate: python -m bench.rollout"""

from functools import partial
from pathlib import Path
from statistics import median

import train_oswft
from bench.measure import goal, markdown_table, print_section, ratio, take_turns, timed
from bench.setup import BASE, BATCH, MAX_TOKENS, load_rows, tiny_base
from data import load_tokenizer
from engine import init_ranks
from rollout import CHECKED_QUERIES, Rollout


def main(base: Path = BASE, repetitions: int = 21) -> list[str]:
    """Measure with the tiny model in `base`; returns Markdown."""
    model = tiny_base(base) / "model"
    rows = load_rows(model, base / "train.jsonl", 128)[:BATCH]
    prompts, seeds = [row.prompt_ids for row in rows], list(range(BATCH))
    init_ranks("gloo")
    args = train_oswft.Args(model=str(model), data="", precision="fp32")
    ours = Rollout(args, load_tokenizer(str(model)), 128, load_weights_from_disk=True)

    def bare(num_samples: int, seeded: bool = True, logprobs: int | None = None) -> int:
        options = {"n": num_samples, "max_tokens": MAX_TOKENS, "logprobs": logprobs}
        options |= {"stop_token_ids": ours.stop_token_ids, "detokenize": False}
        given = seeds if seeded else [None] * BATCH
        params = [ours.vllm.SamplingParams(seed=seed, **options) for seed in given]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = ours.llm.generate(inputs, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    def through_rollout(num_samples: int, logprobs: int = CHECKED_QUERIES) -> int:
        found = ours.generate(prompts, num_samples, MAX_TOKENS, seeds, logprobs=logprobs)
        return sum(len(completion.token_ids) for completion in found)

    def tokens_per_second(sample, *args) -> float:
        tokens = []
        ours.llm.reset_prefix_cache()
        seconds = timed(lambda: tokens.append(sample(*args)))
        return sum(tokens) / seconds

    cases = {
        "OSW-FT, 2 a prompt: `rollout.py`": (through_rollout, 2),
        "OSW-FT, 2 a prompt: `LLM.generate`": (bare, 2),
        "GRPO, 8 a prompt: `rollout.py`": (through_rollout, 8),
        "GRPO, 8 a prompt: `LLM.generate`": (bare, 8),
        "the same, all log-probabilities: `rollout.py`": (through_rollout, 8, BATCH),
        "the same, all log-probabilities: `LLM.generate`": (bare, 8, True, 0),
        "8 a prompt, no seeds: `LLM.generate`": (bare, 8, False),
    }
    calls = {name: partial(tokens_per_second, *case) for name, case in cases.items()}
    measured = take_turns(calls, repetitions, warm_up=2)
    oswft, oswft_bare, grpo, grpo_bare, *_ = measured.values()
    table = [[n, f"{median(r):,.0f}", f"{ratio(r, grpo_bare):.2f}"] for n, r in measured.items()]
    return [
        f"{BATCH} prompts of the demo, tiny model, fp32; `rollout.py` also decodes the text, and "
        f"takes the log-probabilities of {CHECKED_QUERIES} prompts' answers. A seed for each "
        "request makes a run repeatable for any number of ranks.",
        markdown_table(["", "tokens/s", "÷ GRPO's `LLM.generate`"], table),
        goal("OSW-FT's rollouts ÷ `LLM.generate`", ratio(oswft, oswft_bare), "≥ 0.97"),
        goal("GRPO's rollouts ÷ `LLM.generate`", ratio(grpo, grpo_bare), "≥ 0.97"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
