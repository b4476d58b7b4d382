"""The verdicts and the picture of docs/study/plan4.md, from its rows: python -m real.report

Prints Markdown for docs/study/fourth.md, and draws docs/study/kl.png. Runs are paired: the same
base, and the same seed of data order and sampling.
"""

from pathlib import Path

from arguments import one_line_errors
from data import read_rows
from paper.plot import STYLE

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

ROWS = Path(__file__).parent.parent / "docs" / "study" / "fourth.jsonl"
ARMS = {"sft": "SFT", "oswft": "OSW-FT", "half": "SFT at r / 2", "static": "static weights"}
COLORS = dict(zip(ARMS, ("#c44e52", "#4c72b0", "#dd8452", "#55a868"), strict=True))
TESTS = {  # score at equal gain, or at the end; two arms; the alternative
    "R1": ("kl", "oswft", "sft", "less"),
    "R2": ("kl", "oswft", "half", "two-sided"),
    "R3": ("gain at the end", "oswft", "sft", "two-sided"),
    "R4": ("style", "oswft", "sft", "less"),
}
SCORES = ("pass@4", "kl", "easy", "style", "skill", "multiarith", "commonsense", "TFLOPs")
SCORES += ("seconds", "gain at the end")
PARAMETERS, BATCH = 134.5e6, 64
PROMPT, WEIGHED = 79.6, 260_000  # tokens: of a prompt, mean; read and sampled for static weights


def read_curves(rows: list[dict]) -> dict[tuple, pd.DataFrame]:
    """By (arm, base's hash, seed): the base, then the run's checkpoints."""
    bases = {row["base_hash"]: row for row in rows if row["run"] == "base"}
    curves = {}
    for row in rows:
        if row["run"] in ARMS:
            start = {**bases[row["base_hash"]], "step": 0, "seconds": 0, "train_tokens": 0}
            curve = pd.DataFrame([start | {"rollout_tokens": 0}, *row["checkpoints"]])
            sampled = curve.rollout_tokens
            if row["run"] == "oswft":
                sampled = sampled + PROMPT * BATCH * curve.step
            elif row["run"] == "static":
                sampled = sampled + WEIGHED
            curve["TFLOPs"] = PARAMETERS * (6 * curve.train_tokens + 2 * sampled) / 1e12
            curves[row["run"], row["base_hash"], row["seed"]] = curve
    return curves


def levels_of(rows: list[dict]) -> list[float]:
    """50 and 75 % of the rise of SFT at the chosen rate, on the choosing seed."""
    tried = [row for row in rows if row["run"].startswith("sft-")]
    best = max(row["checkpoints"][-1]["gain"] for row in tried)
    bases = {row["base_hash"]: row["gain"] for row in rows if row["run"] == "base"}
    start = bases[tried[0]["base_hash"]]
    return [start + share * (best - start) for share in (0.5, 0.75)]


def at_level(gain: np.ndarray, score: np.ndarray, level: float) -> float:
    """A score where the gain first rises to a level, between two checkpoints; else the last one."""
    rises = np.flatnonzero((gain[:-1] <= level) & (level <= gain[1:]))
    part = slice(rises[0], rises[0] + 2) if len(rises) else slice(-1, None)
    return float(np.interp(level, gain[part], score[part]))


def score(curve: pd.DataFrame, name: str, levels: list[float]) -> float:
    """At equal gain: the mean over the levels that the run reaches, else its last one."""
    name, _, end = name.partition(" at ")
    reached = [] if end else [level for level in levels if curve.gain.max() >= level]
    found = [at_level(curve.gain.to_numpy(), curve[name].to_numpy(), level) for level in reached]
    return float(np.mean(found)) if found else curve[name].iloc[-1]


def tests(curves: dict, levels: list[float]) -> list[str]:
    """A line for each hypothesis with at least two pairs: p of t, of Holm's four, of sign flips."""
    found = {}
    for name, (what, a, b, side) in TESTS.items():
        pairs = sorted(key[1:] for key in curves if key[0] == a and (b, *key[1:]) in curves)
        if len(pairs) < 2:
            continue
        x = [np.subtract(*(score(curves[arm, *p], what, levels) for arm in (a, b))) for p in pairs]
        test = stats.ttest_1samp(x, 0, alternative=side)
        flips = stats.permutation_test((x,), np.mean, permutation_type="samples", alternative=side)
        width = stats.ttest_1samp(x, 0).confidence_interval().high - np.mean(x)
        found[name] = np.mean(x), width, len(x), test.pvalue, flips.pvalue
    lines, largest, holm = [], 0.0, {}
    for rank, name in enumerate(sorted(found, key=lambda name: found[name][3])):
        largest = holm[name] = max(largest, min(1, (len(TESTS) - rank) * found[name][3]))
    for name, (mean, width, count, p, exact) in found.items():
        what, a, b, side = TESTS[name]
        cells = [name, what, f"{ARMS[a]} − {ARMS[b]}", side, f"{mean:+.3f} ± {width:.3f}", count]
        cells += [f"{value:.2g}" for value in (p, holm[name], exact)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    rows = [row for _, row in read_rows(str(ROWS))]
    curves, levels = read_curves(rows), levels_of(rows)
    print("| at equal gain |", *(f"{name} |" for name in SCORES))
    print("|---" * (1 + len(SCORES)) + "|")
    plt.rcParams.update(STYLE)
    for arm, title in ARMS.items():
        if not (own := [curve for key, curve in curves.items() if key[0] == arm]):
            continue
        means = [np.mean([score(curve, name, levels) for curve in own]) for name in SCORES]
        print(f"| {title} ({len(own)}) |", *(f"{mean:.3g} |" for mean in means))
        for curve in own:
            plt.plot(curve.gain, curve.kl, color=COLORS[arm], linewidth=0.5, alpha=0.4)
        mean = sum(curve[["gain", "kl"]] for curve in own) / len(own)
        plt.plot(mean.gain, mean.kl, "o-", color=COLORS[arm], label=title, markersize=3)
    plt.gca().set(xlabel="gain: pass@1 on real problems", ylabel="KL of the base from the model")
    plt.legend()
    plt.savefig(ROWS.parent / "kl.png")
    print("\nlevels of gain:", *(f"{level:.4f}" for level in levels))
    for key, curve in curves.items():
        if missed := [f"{level:.4f}" for level in levels if curve.gain.max() < level]:
            print(*key, "does not reach", *missed)
    print("\n| | score | difference | alternative | mean, 95 % | pairs | p | Holm | exact |")
    print("|---" * 9 + "|", *tests(curves, levels), sep="\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
