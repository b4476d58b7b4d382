"""Tokens/s through rollout.py next to the bare LLM.generate: python -m bench.rollout"""

from functools import partial
from pathlib import Path

import train_oswft
from bench.measure import (
    goal,
    markdown_table,
    print_section,
    ratio,
    spread,
    take_turns,
    tokens_per_second,
)
from bench.setup import BASE, BATCH, MAX_TOKENS, load_rows, tiny_base
from data import load_tokenizer
from engine import init_ranks
from rollout import Rollout, num_checked


def main(base: Path = BASE, repetitions: int = 21) -> list[str]:
    """Measure with the tiny model in `base`; returns Markdown."""
    model = tiny_base(base) / "model"
    prompts = [row.prompt_ids for row in load_rows(model, base / "train.jsonl", 128)[:BATCH]]
    seeds, checked = list(range(BATCH)), num_checked(range(BATCH))
    init_ranks("gloo")
    args = train_oswft.Args(model=str(model), data="", precision="fp32")
    ours = Rollout(args, load_tokenizer(str(model)), 128, load_weights_from_disk=True)

    def bare(num_samples: int) -> list:
        ours.llm.reset_prefix_cache()
        options = {"n": num_samples, "max_tokens": MAX_TOKENS, "detokenize": False}
        options["stop_token_ids"] = ours.stop_token_ids
        params = [ours.vllm.SamplingParams(seed=seed, **options) for seed in seeds]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = ours.llm.generate(inputs, params, use_tqdm=False)
        return [sample for output in outputs for sample in output.outputs]

    def through_rollout(num_samples: int) -> list:
        ours.llm.reset_prefix_cache()
        return ours.generate(prompts, num_samples, MAX_TOKENS, seeds, logprobs=checked)

    samples = {
        "OSW-FT, 2 a prompt: `rollout.py`": partial(through_rollout, 2),
        "OSW-FT, 2 a prompt: `LLM.generate`": partial(bare, 2),
        "GRPO, 8 a prompt: `rollout.py`": partial(through_rollout, 8),
        "GRPO, 8 a prompt: `LLM.generate`": partial(bare, 8),
    }
    calls = {name: partial(tokens_per_second, sample) for name, sample in samples.items()}
    measured = take_turns(calls, repetitions, warm_up=2)
    oswft, oswft_bare, grpo, grpo_bare = measured.values()
    table = [[name, spread(r), ratio(r, grpo_bare)] for name, r in measured.items()]
    return [
        f"{BATCH} prompts of the demo, tiny model, fp32; `rollout.py` also decodes the text, and "
        f"takes the log-probabilities of {checked} prompts' answers. A seed for each "
        "request makes a run repeatable for any number of ranks.",
        markdown_table(["", "tokens/s", "÷ GRPO's `LLM.generate`"], table),
        goal("OSW-FT's rollouts", "`LLM.generate`", ratio(oswft, oswft_bare), "≥ 0.97"),
        goal("GRPO's rollouts", "`LLM.generate`", ratio(grpo, grpo_bare), "≥ 0.97"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
