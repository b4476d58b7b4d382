"""The sixth study's tests, and docs/study/study.png, from the rows: python -m paper.sixth"""

from pathlib import Path

from arguments import command_line
from data import read_rows
from look.plot import STYLE

import matplotlib.pyplot as plt
import numpy as np
import tyro
from scipy import stats

FOLDER = Path(__file__).parent.parent / "docs" / "study"
GAIN, EASY = ("real_held", "middle_held"), ("easy_held",)
STEPS = {"fifth": (40, 50, 60), "sixth": (50, 60)}  # whose mean counts
TESTS = {  # measure, the arm that OSW-FT is compared with, points that count as equal
    "P1": ("gain", "A", 1.5),
    "P2": ("gain", "C", 1.5),
    "P3": ("easy", "A", 3.0),
    "P4": ("easy", "C", 3.0),
}
ARMS = {"A": "SFT", "B": "OSW-FT", "C": "control"}


def read_runs(study: str) -> dict[int, dict[str, list[dict]]]:
    """The counted checkpoints of regime S, by seed and arm, of whole triples alone."""
    runs = {}
    for _, row in read_rows(str(FOLDER / f"{study}.jsonl")):
        if row["arm"] in ARMS and row.get("regime", "S") == "S":
            points = [p for p in row["checkpoints"] if p["step"] in STEPS[study]]
            runs.setdefault(row["seed"], {})[row["arm"]] = points
    return {seed: arms for seed, arms in sorted(runs.items()) if arms.keys() == ARMS.keys()}


def score(points: list[dict], measure: str) -> float:
    """A score in percent: of gain the mean of all checkpoints, of the others the last one's."""
    kind = "greedy" if measure == "greedy" else "counts"
    names = EASY if measure == "easy" else GAIN
    counted = points if measure in ("gain", "real", "middle", "pass@4") else points[-1:]
    if measure in ("real", "middle"):
        names = (f"{measure}_held",)
    right = np.array([[n for name in names for n in point[kind][name]] for point in counted])
    if measure == "pass@4":
        return 100 * (right > 0).mean()
    return 100 * right.mean() / (1 if measure == "greedy" else 4)


def differences(study: str, measure: str, arm: str) -> np.ndarray:
    """OSW-FT less the other arm, one for each seed."""
    runs = read_runs(study).values()
    return np.array([score(arms["B"], measure) - score(arms[arm], measure) for arms in runs])


def interval(x: np.ndarray) -> str:
    return f"{x.mean():+.1f} ± {stats.t.ppf(0.975, len(x) - 1) * stats.sem(x):.1f}"


def main() -> None:
    tests = {name: differences("sixth", measure, arm) for name, (measure, arm, _) in TESTS.items()}
    p = {name: stats.ttest_1samp(x, 0).pvalue for name, x in tests.items()}
    holm, largest = {}, 0.0
    for n, name in enumerate(sorted(p, key=p.get)):
        largest = holm[name] = max(largest, min(1, p[name] * (len(p) - n)))
    for name, x in tests.items():
        measure, arm, margin = TESTS[name]
        flips = stats.permutation_test((x,), np.mean, permutation_type="samples", n_resamples=1e5)
        inside = max(map(abs, stats.ttest_1samp(x, 0).confidence_interval(0.9))) < margin
        print(
            f"{name} {measure} less {ARMS[arm]:8}{len(x)} pairs {interval(x)}  p {p[name]:.2g}",
            end="",
        )
        print(f"  Holm {holm[name]:.2g}  flips {flips.pvalue:.2g}  equal {inside}  {x.round(1)}")
    for study in STEPS:
        runs = read_runs(study)
        for measure in ("gain", "real", "middle", "pass@4", "greedy", "easy"):
            means = [np.mean([score(r[arm], measure) for r in runs.values()]) for arm in ARMS]
            less = [interval(differences(study, measure, arm)) for arm in "AC"]
            print(f"{study} {measure:7}", *(f"{m:6.1f}" for m in means), *less, sep="  ")

    plt.rcParams.update(STYLE)
    columns = [("gain", "fifth"), ("gain", "sixth"), ("greedy", "fifth"), ("greedy", "sixth")]
    columns += [("easy", "fifth"), ("easy", "sixth")]
    for arm, colour, side in ("A", "#c44e52", -0.2), ("C", "#4c72b0", 0.2):
        for n, (measure, study) in enumerate(columns):
            x = differences(study, measure, arm)
            at = n + side + np.linspace(-0.1, 0.1, len(x))
            plt.plot(at, x, "o", color=colour, alpha=0.4, markersize=4)
            width = stats.t.ppf(0.975, len(x) - 1) * stats.sem(x)
            label = f"OSW-FT − {ARMS[arm]}" if n == 0 else None
            plt.errorbar(n + side, x.mean(), width, fmt="s", color=colour, capsize=3, label=label)
    plt.axhline(0, color="black", linewidth=0.5)
    sampling = {"fifth": "T = 1", "sixth": "T = 0.6"}
    labels = [f"{m}\n{'greedy' if m == 'greedy' else sampling[s]}\n({s})" for m, s in columns]
    labels = [label.replace("greedy\ngreedy", "gain\ngreedy") for label in labels]
    plt.xticks(range(len(columns)), labels)
    plt.ylabel("points of pass@1")
    plt.legend()
    plt.savefig(FOLDER / "study.png")


if __name__ == "__main__":
    with command_line():
        tyro.cli(main, prog="python -m paper.sixth", description=__doc__)
