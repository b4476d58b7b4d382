"""A step of SFT, OSW-FT (K=2) and GRPO (G=8), and of TRL's trainers: python -m bench.step"""

from functools import partial
from pathlib import Path
from statistics import median

import torch

import train_oswft
from bench import peers
from bench.measure import goal, markdown_table, print_section, ratio, take_turns, timed
from bench.setup import BASE, BATCH, PHASES, load_rows, run_steps, tiny_base
from engine import init_distributed, load_engine, share_cores

SKIPPED = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of queries with weight 0
MAX_LENGTH = 128


def main(base: Path = BASE, repetitions: int = 5, steps: int = 4) -> list[str]:
    """Measure with the tiny model in `base`; a turn has so many steps. Returns Markdown."""
    share_cores()
    model, data = tiny_base(base) / "model", base / "train.jsonl"
    rows = load_rows(model, data, MAX_LENGTH)[: BATCH * steps]
    scripts = {"SFT": "train_sft.py", "OSW-FT": "train_oswft.py", "GRPO": "train_grpo.py"}
    calls = {
        name: partial(run_steps, script, model, data, MAX_LENGTH, steps)
        for name, script in scripts.items()
    }
    calls["TRL's SFTTrainer with our weights"] = peers.oswft(model, rows)
    calls["TRL's GRPOTrainer"] = peers.grpo(model, rows)
    measured = take_turns(calls, repetitions)
    table, whole = [], []
    for name, turns in measured.items():
        seconds = [median(turn.get(phase, 0) for turn in turns) for phase in PHASES]
        whole.append([sum(turn.get(phase, 0) for phase in PHASES) for turn in turns])
        tokens = median(turn["rollout_tokens"] for turn in turns)
        row = [name, *(f"{s:.3f} ({s / sum(seconds):.0%})" for s in seconds)]
        table.append([*row, f"{median(whole[-1]):.3f}", f"{tokens:,.0f}"])
    _, oswft, grpo, trl_oswft, trl_grpo = whole

    init_distributed()
    args = train_oswft.Args(model=str(model), data="", precision="fp32", max_length=MAX_LENGTH)
    engine = load_engine(args)

    def update(skipped: float) -> float:
        weights = (torch.arange(BATCH) >= skipped * BATCH).float()
        return timed(lambda: train_oswft.update(engine, rows[:BATCH], weights, args))

    updates = take_turns({share: partial(update, share) for share in SKIPPED}, repetitions)
    skipped = [
        [f"{share:.0%} skipped", f"{median(s):.3f}", f"{ratio(s, updates[0.0]):.2f}"]
        for share, s in updates.items()
    ]
    return [
        f"The demo's model and data, {BATCH} queries, fp32, one rank with all cores; OSW-FT with "
        "K = 2, GRPO with G = 8; the model is the base, before fine-tuning. TRL samples by "
        "`generate`, at its fastest settings of those tried: all rows at once, and 128 (SFT) and "
        "256 (GRPO) to a pass of an update. Our `Verifier` checks all.",
        markdown_table(["s a step (share)", *PHASES, "step", "tokens sampled"], table),
        goal("OSW-FT's step ÷ GRPO's", ratio(oswft, grpo), "≤ 0.35"),
        goal("TRL's SFTTrainer, s a step ÷ ours", ratio(trl_oswft, oswft), "≥ 3"),
        goal("TRL's GRPOTrainer, s a step ÷ ours", ratio(trl_grpo, grpo), "≥ 3"),
        "OSW-FT's update with a given share of queries of weight 0, which are skipped:",
        markdown_table(["", "s", "÷ none skipped"], skipped),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
