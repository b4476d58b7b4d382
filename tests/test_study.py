"""The numbers of docs/study.md, from the rows alone: nothing of paper/fifth.py is called."""

import itertools
import statistics

from conftest import ROOT
from data import read_rows

import pytest
from scipy import stats

ROWS = [row for _, row in read_rows(str(ROOT / "docs/study/fifth.jsonl"))]
RUNS = {(r["regime"], r["arm"], r["seed"]): r["checkpoints"] for r in ROWS if r["arm"] in "ABC"}
BASES = {row["regime"]: row for row in ROWS if row["arm"] == "base"}
GOAL = {"S": ("real_held", "middle_held"), "O": ("kept_held",)}
ARMS = {"SFT": "A", "OSW-FT": "B", "control": "C"}
TABLES = {  # by the first cell: the cells of each row, the head's first
    table[0][0] or table[0][1]: table
    for block in (ROOT / "docs/study.md").read_text().split("\n\n")
    if block.startswith("|")
    for table in [[[c.strip() for c in row.split("|")[1:-1]] for row in block.splitlines()]]
}


def pass_at_1(point: dict, *names: str) -> float:
    counts = [count for name in names for count in point["counts"][name]]
    return 100 * sum(counts) / 4 / len(counts)


def counted(regime: str, arm: str, seed: int, *names: str) -> float:
    """pass@1 on these sets, else on the regime's goal: the mean of steps 40, 50 and 60."""
    points = RUNS[regime, arm, seed][-3:]
    assert [point["step"] for point in points] == [40, 50, 60]
    return statistics.mean(pass_at_1(point, *names or GOAL[regime]) for point in points)


def sft_after_as_many_tokens(seed: int) -> float:
    """Gain of SFT where it has trained on as many solution tokens as OSW-FT at its three steps."""
    sft, found = RUNS["S", "A", seed], []
    for tokens in (p["solution_tokens"] for p in RUNS["S", "B", seed] if p["step"] >= 40):
        low = max((p for p in sft if p["solution_tokens"] <= tokens), key=lambda p: p["step"])
        high = min((p for p in sft if p["solution_tokens"] > tokens), key=lambda p: p["step"])
        span = high["solution_tokens"] - low["solution_tokens"]
        part = (tokens - low["solution_tokens"]) / span
        before, after = (pass_at_1(point, *GOAL["S"]) for point in (low, high))
        found.append((1 - part) * before + part * after)
    return statistics.mean(found)


def less(regime: str, arm: str, *names: str) -> list[float]:
    """OSW-FT less another arm, for each seed."""
    ours, theirs = ([counted(regime, a, n, *names) for n in range(5)] for a in ("B", arm))
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


def tflops(point: dict) -> float:
    sampled = point["sampled_tokens"] + point["read_tokens"]
    return 134.5e6 * (6 * point["train_tokens"] + 2 * sampled) / 1e12


def solved(point: dict, *names: str) -> float:
    return 100 * statistics.mean(count > 0 for name in names for count in point["counts"][name])


HEADS = {
    "S": "gain real middle easy pass@4 greedy tokens TFLOPs",
    "O": "retention begun style easy real pass@4 greedy tokens TFLOPs",
}


@pytest.mark.parametrize("regime", HEADS)
def test_each_regimes_table_has_its_columns_and_arms(regime):
    head, _, *rows = TABLES[f"regime {regime}"]
    assert head[1:] == HEADS[regime].split()
    assert [row[0] for row in rows] == ["base", *ARMS]


@pytest.mark.parametrize("regime", HEADS)
@pytest.mark.parametrize("title", ["base", *ARMS])
def test_the_means_of_an_arm_are_those_of_the_rows(title, regime):
    runs, goal = [[BASES[regime]]], GOAL[regime]
    if title != "base":
        runs = [RUNS[regime, ARMS[title], n][-3:] for n in range(5)]
        assert all([p["step"] for p in run] == [40, 50, 60] for run in runs)
    points = [point for run in runs for point in run]
    means = {  # of each point, or of each greedy answer
        "pass@4": [solved(p, *goal) for p in points],
        "greedy": [100 * right for run in runs for n in goal for right in run[-1]["greedy"][n]],
    }
    means["gain"] = means["retention"] = [pass_at_1(p, *goal) for p in points]
    sets = {f"{kind}_held": kind for kind in ("real", "middle", "easy")} | {"skill": "begun"}
    for name in sets.keys() & points[0]["counts"].keys():
        means[sets[name]] = [pass_at_1(p, name) for p in points]
    if regime == "O":
        means["style"] = [100 * p["style"] for p in points]
    expected = {name: f"{statistics.mean(values):.1f}" for name, values in means.items()}
    expected |= {"tokens": "", "TFLOPs": ""}
    if title != "base":
        tokens = statistics.mean(point["solution_tokens"] for point in points) / 1000
        expected["tokens"] = f"{tokens:.0f}"
        expected["TFLOPs"] = f"{statistics.mean(map(tflops, points)):.0f}"
    [row] = [cells for cells in TABLES[f"regime {regime}"] if cells[0] == title]
    assert row[1:] == [expected[name] for name in HEADS[regime].split()]


def greedy(regime: str, arm: str, seed: int) -> float:
    last = RUNS[regime, arm, seed][-1]["greedy"]
    return 100 * statistics.mean(right for name in GOAL[regime] for right in last[name])


def test_the_text_says_what_the_rows_say():
    page, readme = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/study.md", "README.md")
    )
    below = {name: interval([-value for value in x]) for name, x in PAIRS.items()}
    said = [
        f"gained {below['S2']} points less than SFT",
        f"{below['S3']} less after as many tokens",
    ]
    said.append(f"retention ended {below['O2']} lower.")
    assert f"gained {below['S2']} points of pass@1 less than SFT (95 %, five pairs" in readme
    assert f"retention also ended {below['O2']} points lower" in readme
    most = statistics.mean(PAIRS["O1"]) + half_width(PAIRS["O1"])
    said.append(f"retention is at most {most:.1f} points above the control's (95 %)")
    for regime, text in ("S", "differ from SFT's by {} in S"), ("O", "by {} in O"):
        x = [greedy(regime, "B", n) - greedy(regime, "A", n) for n in range(5)]
        said.append(text.format(interval(x, "+.1f")))
        assert statistics.mean(x) > 0 or regime == "O"  # README: no loss of gain
    easy = [interval([-value for value in less("S", arm, "easy_held")]) for arm in "AC"]
    said.append("{} below SFT, {} below the control".format(*easy))
    real = interval(less("S", "C", "real_held")).lstrip("−")
    said.append(f"it and the control differ by {real}.")
    for arm in "ABC":
        points = [p for n in range(5) for p in RUNS["O", arm, n][-3:]]
        assert statistics.mean(p["style"] for p in points) > 0.97
    said.append("at the end over 97 % were, in each arm")
    early = [RUNS["O", "A", n][0] for n in range(5)]
    assert [point["step"] for point in early] == [20] * 5
    left = statistics.mean(pass_at_1(point, "kept_held") for point in early)
    style = 100 * statistics.mean(point["style"] for point in early)
    said.append(f"After 20 steps SFT's retention was {left:.1f}, with {style:.0f} % of the answers")
    gate = {name: BASES[name]["gate"]["weights"] for name in "SO"}
    shares = [f"{100 * gate[name][w]:.0f} %" for name in "SO" for w in ("0.0", "1.0")]
    said.append("{} are 0 and {} are 1 in S, {} and {} in O".format(*shares))
    rates = {r["learning_rate"]: r["checkpoints"][-1] for r in ROWS if r["arm"] == "rate"}
    base = pass_at_1(BASES["O"], "kept_held")
    within = [
        rate for rate in rates if 30 <= 100 * pass_at_1(rates[rate], "kept_held") / base <= 90
    ]
    assert len(rates) == 3 and max(within) == 5e-5
    style, begun = 100 * rates[1e-5]["style"], pass_at_1(rates[1e-5], "skill")
    said.append(f"{style:.0f} % in that style, and {begun:.1f} begun")
    for text in said:
        assert text in page, text
