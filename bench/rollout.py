"""Tokens/s through rollout.py beside the bare LLM.generate: python -m bench.rollout"""

from functools import partial
from pathlib import Path
from statistics import median

import train_oswft
from bench.measure import goal, markdown_table, print_section, ratio, take_turns, timed
from bench.setup import BASE, tiny_examples
from engine import init_ranks
from rollout import CHECKED_QUERIES, Rollout


def main(base: Path = BASE, repetitions: int = 21) -> list[str]:
    """Measure with the tiny model in `base`; returns Markdown."""
    tokenizer, examples = tiny_examples(base)
    prompts = [example.prompt_ids for example in examples[:128]]
    seeds = list(range(len(prompts)))
    init_ranks("gloo")
    args = train_oswft.Args(model=str(base / "model"), data="", precision="fp32")
    ours = Rollout(args, tokenizer, 128, load_weights_from_disk=True)

    def bare(num_samples: int, seeded: bool = True, logprobs: int | None = None) -> int:
        options = {"n": num_samples, "max_tokens": 48, "logprobs": logprobs, "detokenize": False}
        options["stop_token_ids"] = ours.stop_token_ids
        given = seeds if seeded else [None] * len(prompts)
        params = [ours.vllm.SamplingParams(seed=seed, **options) for seed in given]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = ours.llm.generate(inputs, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    def through_rollout(num_samples: int, logprobs: int = CHECKED_QUERIES) -> int:
        found = ours.generate(prompts, num_samples, max_tokens=48, seeds=seeds, logprobs=logprobs)
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
        "the same, all log-probabilities: `rollout.py`": (through_rollout, 8, len(prompts)),
        "the same, all log-probabilities: `LLM.generate`": (bare, 8, True, 0),
        "8 a prompt, no seeds: `LLM.generate`": (bare, 8, False),
    }
    calls = {name: partial(tokens_per_second, *case) for name, case in cases.items()}
    measured = take_turns(calls, repetitions, warm_up=2)
    oswft, oswft_bare, grpo, grpo_bare, *_ = measured.values()
    rows = [[n, f"{median(r):,.0f}", f"{ratio(r, grpo_bare):.2f}"] for n, r in measured.items()]
    return [
        "128 prompts of the demo, tiny model, fp32; `rollout.py` also decodes the text, and takes "
        f"the log-probabilities of {CHECKED_QUERIES} prompts' answers. A seed for each request "
        "makes a run repeatable for any number of ranks.",
        markdown_table(["", "tokens/s", "÷ GRPO's `LLM.generate`"], rows),
        goal("OSW-FT's rollouts ÷ `LLM.generate`", ratio(oswft, oswft_bare), "≥ 0.97")
        + "\n"
        + goal("GRPO's rollouts ÷ `LLM.generate`", ratio(grpo, grpo_bare), "≥ 0.97"),
        "Of GRPO's sampling, by a profile: 42 % is the model's forward pass (16 % its matrix "
        "products), 13 % vLLM's scheduler, 9 % its sampler, 9 % what it notes of each step, 8 % "
        "its output, 6 % its inputs, 2 % `rollout.py`. All but the products is Python and small "
        "operations for every sequence and token, so 512 or 1,024 at a time are no faster.",
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
