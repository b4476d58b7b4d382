"""Tokens/s through rollout.py beside the bare LLM.generate: python -m bench.rollout"""

from functools import partial
from pathlib import Path
from statistics import median

from bench.measure import goal, markdown_table, print_section, ratio, take_turns, timed
from bench.setup import BASE, tiny_examples
from ranks import share_cores
from rollout import CHECKED_QUERIES, Rollout

SAME = "`LLM.generate`, the same sampling parameters"


def main(base: Path = BASE, repetitions: int = 21) -> list[str]:
    """Measure with the tiny model in `base`; returns Markdown."""
    tokenizer, examples = tiny_examples(base)
    prompts = [example.prompt_ids for example in examples[:128]]
    seeds = list(range(len(prompts)))
    share_cores()
    ours = Rollout(str(base / "model"), tokenizer, 128, "fp32", load_weights_from_disk=True)

    def bare(seeded: bool, logprobs: int | None) -> int:
        options = {"n": 2, "max_tokens": 48, "logprobs": logprobs, "detokenize": False}
        options["stop_token_ids"] = ours.stop_token_ids
        given = seeds if seeded else [None] * len(prompts)
        params = [ours.vllm.SamplingParams(seed=seed, **options) for seed in given]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = ours.llm.generate(inputs, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    def through_rollout(logprobs: int) -> int:
        completions = ours.generate(prompts, 2, max_tokens=48, seeds=seeds, logprobs=logprobs)
        return sum(len(completion.token_ids) for completion in completions)

    def tokens_per_second(sample, *args) -> float:
        tokens = []
        ours.llm.reset_prefix_cache()
        seconds = timed(lambda: tokens.extend(sample(*args) for _ in range(3)))
        return sum(tokens) / seconds

    cases = {
        "`rollout.py`, as OSW-FT calls it": (through_rollout, CHECKED_QUERIES),
        SAME: (bare, True, None),
        "`rollout.py`, as GRPO calls it (log-probabilities)": (through_rollout, len(prompts)),
        f"{SAME} with log-probabilities": (bare, True, 0),
        "`LLM.generate`, no seeds, no log-probabilities": (bare, False, None),
    }
    calls = {name: partial(tokens_per_second, *case) for name, case in cases.items()}
    measured = take_turns(calls, repetitions, warm_up=2)
    oswft, same, grpo, with_logprobs, _ = measured.values()
    rows = [[n, f"{median(r):,.0f}", f"{ratio(r, same):.2f}"] for n, r in measured.items()]
    return [
        "128 prompts × 2 of the demo, tiny model, fp32; `rollout.py` also decodes the text. A seed "
        "for each request makes a run repeatable for any number of ranks.",
        markdown_table(["", "tokens/s", "÷ `LLM.generate`"], rows),
        goal("OSW-FT's rollouts ÷ `LLM.generate`", ratio(oswft, same), "≥ 0.97")
        + "\n"
        + goal("GRPO's rollouts ÷ `LLM.generate`", ratio(grpo, with_logprobs), "≥ 0.97"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
