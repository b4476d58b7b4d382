"""A whole step of SFT, OSW-FT (K=2) and GRPO (G=8) on the demo's data: python -m bench.step"""

from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.measure import goal, markdown_table, print_section, ratio, take_turns
from bench.setup import BASE, Setup, tiny_examples, training_setup, training_step

PHASES = ("sync", "rollout", "verify", "train")
METHODS = {"sft": "SFT", "oswft": "OSW-FT, K=2", "grpo": "GRPO, G=8"}
SKIPPED = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of queries with weight 0


def main(base: Path = BASE, repetitions: int = 7) -> list[str]:
    """Measure with the tiny model in `base`; a turn has 128 new queries. Returns Markdown."""
    _, examples = tiny_examples(base)
    turns = dict.fromkeys([*METHODS, *SKIPPED], 0)

    def measure(setup: Setup, case: str | float) -> dict[str, float]:
        start = 128 * turns[case] % (len(examples) - 128)
        queries, turns[case] = examples[start : start + 128], turns[case] + 1
        if case in METHODS:
            return training_step(case, setup, queries, 8 if case == "grpo" else 2, 48)
        weights = torch.ones(128)
        weights[: int(128 * case)] = 0
        return training_step("oswft", setup, queries, 2, 48, weights[torch.randperm(128)])

    with training_setup(base / "model", 128) as setup:
        measured = take_turns({case: partial(measure, setup, case) for case in turns}, repetitions)
    whole = {case: [sum(step.values()) for step in steps] for case, steps in measured.items()}

    def row(name: str, case: str | float, beside: str | float) -> list[str]:
        phases = [median(step.get(phase, 0) for step in measured[case]) for phase in PHASES]
        shares = [f"{phase:.3f} ({phase / sum(phases):.0%})" for phase in phases]
        growth = ratio(whole[case], whole[beside])
        return [name, *shares, f"{median(whole[case]):.3f}", f"{growth:.2f}"]

    methods = [row(name, case, "grpo") for case, name in METHODS.items()]
    skipped = [row(f"{share:.0%} skipped", share, SKIPPED[0]) for share in SKIPPED]
    header = ["s (share)", *PHASES, "step"]
    return [
        "The demo's model and data, 128 queries, fp32, one rank; the model is the base, before "
        "fine-tuning.",
        markdown_table([*header, "÷ GRPO"], methods),
        "OSW-FT with a given share of queries of weight 0, which are skipped:",
        markdown_table([*header, "÷ none skipped"], skipped),
        goal("OSW-FT's step ÷ GRPO's", ratio(whole["oswft"], whole["grpo"]), "≤ 0.35"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
