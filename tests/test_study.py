"""The numbers of docs/study.md: they follow from the committed rows.

What is tested is worked out twice, by paper/fifth.py and here.
"""

import itertools
import statistics

from conftest import ROOT
from data import read_rows
from paper import fifth

import numpy as np
import pytest
from scipy import stats

ROWS = [row for _, row in read_rows(str(ROOT / "docs/study/fifth.jsonl"))]
RUNS = {(r["regime"], r["arm"], r["seed"]): r["checkpoints"] for r in ROWS if r["arm"] in "ABC"}
POINTS = fifth.read_points(ROWS)
GOAL = {"S": ("real_held", "middle_held"), "O": ("kept_held",)}
ARMS = {"base": "base", "SFT": "A", "OSW-FT": "B", "control": "C"}
TABLES = {  # by the first cell: the cells of each row, the head's first
    table[0][0] or table[0][1]: table
    for block in (ROOT / "docs/study.md").read_text().split("\n\n")
    if block.startswith("|")
    for table in [[[c.strip() for c in row.split("|")[1:-1]] for row in block.splitlines()]]
}


def pass_at_1(point: dict, regime: str) -> float:
    """Of the regime's goal."""
    counts = [count for name in GOAL[regime] for count in point["counts"][name]]
    return 100 * sum(counts) / 4 / len(counts)


def counted(regime: str, arm: str, seed: int) -> float:
    """The mean of steps 40, 50 and 60."""
    points = RUNS[regime, arm, seed][-3:]
    assert [point["step"] for point in points] == [40, 50, 60]
    return statistics.mean(pass_at_1(point, regime) for point in points)


def sft_after_as_many_tokens(seed: int) -> float:
    """Gain of SFT where it has trained on as many solution tokens as OSW-FT at its three steps."""
    sft, ours = RUNS["S", "A", seed], [p for p in RUNS["S", "B", seed] if p["step"] >= 40]
    tokens, known = ([p["solution_tokens"] for p in points] for points in (ours, sft))
    return np.interp(tokens, known, [pass_at_1(p, "S") for p in sft]).mean()


def less(regime: str, arm: str) -> list[float]:
    """OSW-FT less another arm, for each seed."""
    ours, theirs = ([counted(regime, a, n) for n in range(5)] for a in ("B", arm))
    return [a - b for a, b in zip(ours, theirs, strict=True)]


PAIRS = {
    "S1": less("S", "C"),
    "S2": less("S", "A"),
    "S3": [counted("S", "B", n) - sft_after_as_many_tokens(n) for n in range(5)],
    "O1": less("O", "C"),
    "O2": less("O", "A"),
}


def half_width(x: list[float]) -> float:
    """Of the 95 % interval: Student's t with four degrees of freedom."""
    return 2.776 * statistics.stdev(x) / 5**0.5


def interval(x: list[float], form: str = ".1f") -> str:
    return f"{statistics.mean(x):{form}} ± {half_width(x):.1f}".replace("-", "−")


def test_the_five_tests_are_those_of_the_rows():
    mean = {name: statistics.mean(x) for name, x in PAIRS.items()}
    error = {name: statistics.stdev(x) / 5**0.5 for name, x in PAIRS.items()}
    p = {name: 2 * stats.t.sf(abs(mean[name]) / error[name], 4) for name in PAIRS}
    holm, largest = {}, 0.0
    for n, name in enumerate(sorted(p, key=p.get)):
        largest = holm[name] = max(largest, min(1, p[name] * (5 - n)))
    found = fifth.test_table({name: fifth.differences(name, POINTS) for name in PAIRS})
    _, _, *rows = TABLES["OSW-FT less"]
    assert [row[0] for row in rows] == [*PAIRS]
    for row, (name, x) in zip(rows, PAIRS.items(), strict=True):
        flips = [
            abs(sum(sign * value for sign, value in zip(signs, x, strict=True)))
            for signs in itertools.product((-1, 1), repeat=5)
        ]
        exact = sum(flip >= abs(sum(x)) - 1e-9 for flip in flips) / 32
        equal = abs(mean[name]) + 2.132 * error[name] < (1.5 if name[0] == "S" else 4)
        cells = [f"{p[name]:.2g}", f"{holm[name]:.2g}", f"{exact:.3g}", "yes" if equal else "no"]
        assert row[2:] == [interval(x, "+.1f"), *cells]
        ours = found.loc[name, ["mean", "±", "p", "Holm", "exact", "equal"]].tolist()
        assert ours == pytest.approx(
            [mean[name], half_width(x), p[name], holm[name], exact, equal], rel=1e-3
        )


COLUMNS = {  # of each regime's table, and what paper/fifth.py calls them
    "S": {"gain": "goal", "real": "real_held", "middle": "middle_held", "easy": "easy_held"},
    "O": {
        **{"retention": "goal", "begun": "skill", "style": "style"},
        **{"easy": "easy_held", "real": "real_held"},
    },
}
OF_BOTH = {"pass@4": "goal, pass@4", "greedy": "goal, greedy"}
OF_BOTH |= {"tokens": "solution_tokens", "TFLOPs": "TFLOPs"}


@pytest.mark.parametrize("regime", COLUMNS)
def test_the_means_of_each_arm_are_those_of_the_rows(regime):
    head, _, *rows = TABLES[f"regime {regime}"]
    columns = COLUMNS[regime] | OF_BOTH
    assert head[1:] == [*columns] and [row[0] for row in rows] == [*ARMS]
    part = POINTS[(POINTS.regime == regime) & POINTS.step.isin((0, 40, 50, 60))]
    means = part.groupby("arm").mean(numeric_only=True)
    means["solution_tokens"] /= 1000
    for title, *cells in rows:
        for name, cell in zip(columns, cells, strict=True):
            form = ".0f" if name in ("tokens", "TFLOPs") else ".1f"
            mean = means.loc[ARMS[title], columns[name]]
            assert cell == (f"{mean:{form}}" if mean or form == ".1f" else ""), (title, name)


def greedy(regime: str, arm: str, seed: int) -> float:
    last = RUNS[regime, arm, seed][-1]["greedy"]
    return 100 * statistics.mean(right for name in GOAL[regime] for right in last[name])


def test_the_text_says_what_the_rows_say():
    page, readme = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/study.md", "README.md")
    )
    below = {name: interval([-value for value in x]) for name, x in PAIRS.items()}
    assert f"gained {below['S2']} points of pass@1 less than SFT (95 %, five pairs" in readme
    assert f"retention also ended {below['O2']} points lower" in readme
    most = statistics.mean(PAIRS["O1"]) + half_width(PAIRS["O1"])
    said = [
        f"gained {below['S2']} points less than SFT",
        f"{below['S3']} less after as many tokens",
        f"retention ended {below['O2']} lower.",
        f"retention is at most {most:.1f} points above the control's (95 %)",
    ]
    for regime, text in ("S", "differ from SFT's by {} in S"), ("O", "by {} in O"):
        x = [greedy(regime, "B", n) - greedy(regime, "A", n) for n in range(5)]
        assert statistics.mean(x) > 0 or regime == "O"  # README: no loss of gain
        said.append(text.format(interval(x, "+.1f")))
    for text in said:
        assert text in page, text
