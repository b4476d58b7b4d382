"""Tables of docs/study/plan5.md, and docs/study/fifth.png, from its rows: python -m paper.fifth"""

from pathlib import Path

from arguments import command_line
from data import read_rows
from look.plot import STYLE

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from scipy import stats

ROWS = Path(__file__).parent.parent / "docs" / "study" / "fifth.jsonl"
ARMS = {"A": "SFT", "B": "OSW-FT", "C": "control"}  # C: the weights of B, shuffled
GOAL = {"S": ["real_held", "middle_held"], "O": ["kept_held"]}  # what is gained; what is kept
SEEDS, STEPS, SAMPLES, PARAMETERS = range(5), (40, 50, 60), 4, 134.5e6
SPENT = ("train_tokens", "solution_tokens", "sampled_tokens", "read_tokens", "seconds")
# Of B less another arm: regime, that arm, what is held equal, points that count as equal
TESTS = {
    "S1": ("S", "C", "steps", 1.5),
    "S2": ("S", "A", "steps", 1.5),
    "S3": ("S", "A", "trained tokens", 1.5),
    "O1": ("O", "C", "steps", 4.0),
    "O2": ("O", "A", "steps", 4.0),
}


def read_points(rows: list[dict]) -> pd.DataFrame:
    """Scores in percent of each checkpoint and base."""
    bases = {row["base_hash"]: row for row in rows if row["arm"] == "base"}
    runs = {(f"{r['regime']}{r['seed']}", r["arm"]): r for r in rows if r["arm"] in ARMS}
    points = []
    for name in (f"{regime}{seed}" for regime in GOAL for seed in SEEDS):
        found = {arm: runs[name, arm] for arm in ARMS}
        [base] = {row["base_hash"] for row in found.values()}  # one for all three
        for arm, row in {"base": {"checkpoints": [bases[base]]}, **found}.items():
            key = {"regime": name[0], "seed": name[1:], "arm": arm}
            points += [key | measures(point, GOAL[name[0]]) for point in row["checkpoints"]]
    return pd.DataFrame(points)


def measures(point: dict, goal: list[str]) -> dict:
    """What is said of a checkpoint; "goal" is pass@1 over all problems of these sets."""
    right = {name: np.array(counts) / SAMPLES for name, counts in point["counts"].items()}
    right["goal"] = np.concatenate([right[name] for name in goal])
    right["goal, pass@4"] = right["goal"] > 0
    if "greedy" in point:
        right["goal, greedy"] = np.concatenate([point["greedy"][name] for name in goal])
    right["style"] = point.get("style", np.nan)
    spent = {name: point.get(name, 0) for name in SPENT}
    read = spent["sampled_tokens"] + spent["read_tokens"]
    spent["TFLOPs"] = PARAMETERS * (6 * spent["train_tokens"] + 2 * read) / 1e12
    shares = {name: 100 * np.mean(values) for name, values in right.items()}
    return {"step": point.get("step", 0), **shares, **spent}


def differences(name: str, points: pd.DataFrame) -> list[float]:
    """B less the other arm, a number for each seed: of the means over the counted checkpoints."""
    regime, arm, equal, _ = TESTS[name]
    found = []
    for _, triple in points[points.regime == regime].groupby("seed"):
        ours = triple[(triple.arm == "B") & triple.step.isin(STEPS)]
        other = triple[triple.arm == arm]
        theirs = other[other.step.isin(STEPS)].goal
        if equal == "trained tokens":  # of solutions; linear between the other arm's checkpoints
            x, at = other.solution_tokens, ours.solution_tokens
            assert x.min() <= at.min(), "no checkpoint has as few tokens"
            theirs = np.interp(at, x, other.goal)
        found.append(ours.goal.mean() - np.mean(theirs))
    return found


def test_table(x: dict[str, list[float]]) -> pd.DataFrame:
    """A line for each test: mean ± 95 % interval, p, Holm's, of sign flips; equal or not shown."""
    table = pd.DataFrame({"triples": {name: len(values) for name, values in x.items()}})
    for name, values in x.items():
        test = stats.ttest_1samp(values, 0)
        flips = stats.permutation_test((values,), np.mean, permutation_type="samples")
        within = max(map(abs, test.confidence_interval(0.90))) < TESTS[name][-1]
        found = [np.mean(values), np.ptp(test.confidence_interval(0.95)) / 2, test.pvalue]
        table.loc[name, ["mean", "±", "p", "exact", "equal"]] = [*found, flips.pvalue, within]
    p = table.p.sort_values()
    table["Holm"] = (p * (len(TESTS) - np.arange(len(p)))).cummax().clip(upper=1)
    return table


def main() -> None:
    points = read_points([row for _, row in read_rows(str(ROWS))])
    for regime, part in points[points.step.isin((0, *STEPS))].groupby("regime", sort=False):
        print(f"\nregime {regime}: means over the seeds and steps {STEPS}; greedy: the last alone")
        means = part.groupby("arm", sort=False).mean(numeric_only=True).rename(index=ARMS)
        means = means.drop(columns="step").dropna(axis="columns", how="all")
        print(means.T.to_string(float_format="{:,.1f}".format))
    x = {name: differences(name, points) for name in TESTS}
    table = test_table(x)
    table.insert(0, "OSW-FT less", [f"{ARMS[TESTS[n][1]]} at equal {TESTS[n][2]}" for n in x])
    print("", table.to_string(float_format="{:.3g}".format), sep="\n")
    plt.rcParams.update(STYLE)
    for n, values in enumerate(x.values()):
        plt.plot(n + np.linspace(-0.2, 0.2, len(values)), values, "o", color="#4c72b0")
    plt.errorbar(np.arange(len(x)) + 0.3, table["mean"], table["±"], fmt="s", color="#c44e52")
    plt.axhline(0, color="black", linewidth=0.5)
    plt.xticks(range(len(x)), [f"{name}: {ARMS[TESTS[name][1]]}" for name in x])
    plt.ylabel("OSW-FT less the other, points")
    plt.savefig(ROWS.parent / "fifth.png")


if __name__ == "__main__":
    with command_line():
        tyro.cli(main, prog="python -m paper.fifth", description=__doc__)
