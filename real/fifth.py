"""Tables and picture of docs/study/plan5.md, from its rows: python -m real.fifth

Prints Markdown for docs/study.md, and draws docs/study/fifth.png. While a triple is missing it says
which, and nothing else; `--ended` says that no run will follow.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from arguments import one_line_errors
from data import InputError, read_rows
from paper.plot import STYLE

import matplotlib.pyplot as plt
import numpy as np
import tyro
from scipy import stats

ROWS = Path(__file__).parent.parent / "docs" / "study" / "fifth.jsonl"
ARMS = {"A": "SFT", "B": "OSW-FT, K = 2", "C": "its weights, dealt to the wrong rows"}
SEEDS, STEPS, SAMPLES, PARAMETERS = range(5), (40, 50, 60), 4, 134.5e6
GAIN, KEPT = ("real_held", "middle_held"), ("kept_held",)
# Of B less another arm: regime, problems, that arm, what is held equal, points that count as equal
TESTS = {
    "S1": ("S", GAIN, "C", "steps", 1.5),
    "S2": ("S", GAIN, "A", "steps", 1.5),
    "S3": ("S", GAIN, "A", "trained tokens", 1.5),
    "O1": ("O", KEPT, "C", "steps", 4.0),
    "O2": ("O", KEPT, "A", "steps", 4.0),
}


def read_triples(rows: list[dict], ended: bool = False) -> dict[str, list[dict[str, dict]]]:
    """By regime, for each seed the rows of its arms. Raises InputError if a triple is missing."""
    found = defaultdict(dict)
    for row in rows:
        if row["arm"] in ARMS:
            found[row["regime"], row["seed"]][row["arm"]] = row
    whole = {key: arms for key, arms in sorted(found.items()) if len(arms) == len(ARMS)}
    missing = [f"{regime}{n}" for regime in "SO" for n in SEEDS if (regime, n) not in whole]
    if missing and not ended:
        raise InputError(f"missing, so nothing is read: {' '.join(missing)}")
    for key, arms in whole.items():
        assert len({row["base_hash"] for row in arms.values()}) == 1, f"{key}: several bases"
    return {regime: [arms for key, arms in whole.items() if key[0] == regime] for regime in "SO"}


def share(point: dict, sets: tuple[str, ...]) -> float:
    """pass@1 in percent, over all problems of the sets."""
    return 100 * np.concatenate([point["counts"][name] for name in sets]).mean() / SAMPLES


def counted(row: dict) -> list[dict]:
    return [point for point in row["checkpoints"] if point["step"] in STEPS]


def difference(name: str, arms: dict[str, dict]) -> float:
    """B less the other arm in points, of one seed: the mean over the counted checkpoints."""
    _, sets, arm, equal, _ = TESTS[name]
    ours, points = counted(arms["B"]), arms[arm]["checkpoints"]
    theirs = [share(point, sets) for point in counted(arms[arm])]
    if equal == "trained tokens":  # of solutions; linear between the other arm's checkpoints
        curve = [(p["solution_tokens"], share(p, sets)) for p in points]
        x, y = zip(*curve, strict=True)
        assert x[0] <= ours[0]["solution_tokens"], "no checkpoint has as few tokens"
        theirs = np.interp([p["solution_tokens"] for p in ours], x, y)
    return float(np.mean([share(point, sets) for point in ours]) - np.mean(theirs))


def test_table(triples: dict, difference: Callable = difference) -> list[str]:
    """A line for each test: mean and 95 % interval, p, Holm's, of sign flips; equal or not."""
    x = {name: [difference(name, arms) for arms in triples[TESTS[name][0]]] for name in TESTS}
    x = {name: values for name, values in x.items() if len(values) > 1}
    tests = {name: stats.ttest_1samp(values, 0) for name, values in x.items()}
    largest, holm, lines = 0.0, {}, []
    for rank, name in enumerate(sorted(tests, key=lambda name: tests[name].pvalue)):
        largest = holm[name] = max(largest, min(1, (len(TESTS) - rank) * tests[name].pvalue))
    for name in tests:
        _, _, arm, equal, limit = TESTS[name]
        half = tests[name].confidence_interval(0.95).high - np.mean(x[name])
        low, high = tests[name].confidence_interval(0.90)
        flips = stats.permutation_test((x[name],), np.mean, permutation_type="samples").pvalue
        cells = [name, f"B − {arm} at equal {equal}", len(x[name])]
        cells += [f"{np.mean(x[name]):+.1f} ± {half:.1f}"]
        cells += [f"{p:.2g}" for p in (tests[name].pvalue, holm[name], flips)]
        cells += ["equal" if -limit < low and high < limit else "not shown to be equal"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def arm_table(regime: str, triples: list[dict]) -> list[str]:
    """A line for each arm: scores at the counted checkpoints; tokens and seconds at the end."""
    if not triples:
        return []
    sets = counted(triples[0]["B"])[0]["counts"]
    lines = [f"| {regime} | {' | '.join(sets)} | style | solution tokens | sampled | TFLOPs | s |"]
    for arm, title in ARMS.items():
        points = [point for arms in triples for point in counted(arms[arm])]
        cells = [f"{np.mean([share(point, (name,)) for point in points]):.1f}" for name in sets]
        cells += [f"{100 * np.mean([p.get('style', np.nan) for p in points]):.0f}"]
        ends = [arms[arm]["checkpoints"][-1] for arms in triples]
        sums = {name: np.mean([end[name] for end in ends]) for name in ends[0] if "_" in name}
        cells += [f"{sums['solution_tokens']:,.0f}", f"{sums['sampled_tokens']:,.0f}"]
        flops = 6 * sums["train_tokens"] + 2 * (sums["sampled_tokens"] + sums["read_tokens"])
        cells += [
            f"{PARAMETERS * flops / 1e12:.0f}",
            f"{np.mean([e['seconds'] for e in ends]):.0f}",
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return [lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:], ""]


def main(ended: bool = False) -> None:
    triples = read_triples([row for _, row in read_rows(str(ROWS))], ended)
    print(*arm_table("S", triples["S"]), *arm_table("O", triples["O"]), sep="\n")
    print(
        "| | difference | triples | mean, 95 % | p | Holm | exact | |", "|---" * 8 + "|", sep="\n"
    )
    print(*test_table(triples), sep="\n")
    plt.rcParams.update(STYLE)
    for n, name in enumerate(TESTS):
        x = np.array([difference(name, arms) for arms in triples[TESTS[name][0]]])
        if len(x) < 2:
            continue
        half = stats.ttest_1samp(x, 0).confidence_interval().high - x.mean()
        plt.plot(n + np.linspace(-0.2, 0.2, len(x)), x, "o", color="#4c72b0")
        plt.errorbar(n + 0.3, x.mean(), half, fmt="s", color="#c44e52")
    plt.axhline(0, color="black", linewidth=0.5)
    plt.xticks(range(len(TESTS)), [f"{name}: B − {test[2]}" for name, test in TESTS.items()])
    plt.ylabel("points of pass@1, a dot a triple")
    plt.savefig(ROWS.parent / "fifth.png")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, prog="python -m real.fifth", description=__doc__)
