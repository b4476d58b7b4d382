"""The numbers of docs/study.md, from the rows alone: no code that wrote them is called."""

import itertools
import re
import statistics

from conftest import ROOT
from data import read_rows

import pytest
from scipy import stats

PAGE = " ".join((ROOT / "docs/study.md").read_text().split())
README = " ".join((ROOT / "README.md").read_text().split())
ROWS = {
    study: [row for _, row in read_rows(str(ROOT / f"docs/study/{study}.jsonl"))]
    for study in ("fifth", "sixth")
}
ARMS = {"SFT": "A", "OSW-FT": "B", "control": "C"}
GAIN, STEPS = ("real_held", "middle_held"), {"fifth": (40, 50, 60), "sixth": (50, 60)}
RUNS = {  # by study, regime, arm and seed: all checkpoints
    (study, row.get("regime", "S"), row["arm"], row["seed"]): row["checkpoints"]
    for study, rows in ROWS.items()
    for row in rows
    if row["arm"] in "ABC"
}
BASES = {
    (study, row.get("regime", "S")): row
    for study, rows in ROWS.items()
    for row in rows
    if row["arm"] == "base"
}


def seeds(study: str) -> list[int]:
    """Those of whole triples of regime S."""
    arms = [{n for s, r, a, n in RUNS if (s, r, a) == (study, "S", arm)} for arm in "ABC"]
    return sorted(set.intersection(*arms))


def pass_at_1(point: dict, *names: str) -> float:
    counts = [count for name in names for count in point["counts"][name]]
    return 100 * sum(counts) / 4 / len(counts)


def pass_at_4(point: dict) -> float:
    return 100 * statistics.mean(n > 0 for name in GAIN for n in point["counts"][name])


def greedy(point: dict, *names: str) -> float:
    return 100 * statistics.mean(right for name in names for right in point["greedy"][name])


MEASURES = {  # the score of a checkpoint, in percent
    "gain": lambda p: pass_at_1(p, *GAIN),
    "real": lambda p: pass_at_1(p, "real_held"),
    "middle": lambda p: pass_at_1(p, "middle_held"),
    "pass@4": pass_at_4,
    "greedy": lambda p: greedy(p, *GAIN),
    "easy": lambda p: pass_at_1(p, "easy_held"),
}


def measured(study: str, arm: str, seed: int, name: str) -> float:
    points = [p for p in RUNS[study, "S", arm, seed] if p["step"] in STEPS[study]]
    assert tuple(p["step"] for p in points) == STEPS[study]
    points = points[-1:] if name in ("greedy", "easy") else points  # These two: step 60 alone.
    return statistics.mean(map(MEASURES[name], points))


def less(study: str, arm: str, name: str) -> list[float]:
    """OSW-FT less another arm, for each seed."""
    return [measured(study, "B", n, name) - measured(study, arm, n, name) for n in seeds(study)]


def half_width(x: list[float], level: float = 0.95) -> float:
    """Of Student's interval."""
    t = stats.t.ppf((1 + level) / 2, len(x) - 1)
    return t * statistics.stdev(x) / len(x) ** 0.5


def shown(x: list[float], form: str = "+.1f") -> str:
    return f"{statistics.mean(x):{form}} ± {half_width(x):.1f}".replace("-", "−")


COLUMNS = [("sixth", name) for name in MEASURES]
COLUMNS += [("fifth", "gain"), ("fifth", "greedy"), ("fifth", "easy")]
[TABLE] = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/study.md").read_text(), re.MULTILINE)
HEAD, _, *LINES = [[c.strip() for c in row.split("|")[1:-1]] for row in TABLE.splitlines()]
CELLS = {line[0]: line[1:] for line in LINES}


def test_the_table_has_the_columns_and_arms():
    sampled = {"gain": "gain, T = 1", "greedy": "greedy", "easy": "easy, T = 1"}
    assert HEAD[1:] == [*MEASURES, *sampled.values()]
    assert [*CELLS] == ["base", *ARMS, "OSW-FT − SFT", "OSW-FT − control"]


def test_the_bases_scores_are_those_of_the_rows():
    bases = [f"{MEASURES[name](BASES[study, 'S']):.1f}" for study, name in COLUMNS]
    assert CELLS["base"] == bases


@pytest.mark.parametrize("title", ARMS)
def test_the_means_of_an_arm_are_those_of_the_rows(title):
    means = [
        statistics.mean(measured(study, ARMS[title], n, name) for n in seeds(study))
        for study, name in COLUMNS
    ]
    assert CELLS[title] == [f"{mean:.1f}" for mean in means]


@pytest.mark.parametrize("title", ["SFT", "control"])
def test_the_differences_are_those_of_the_rows(title):
    cells = [shown(less(study, ARMS[title], name)) for study, name in COLUMNS]
    assert CELLS[f"OSW-FT − {title}"] == cells


def test_the_four_planned_tests_are_those_of_the_rows():
    pairs = {
        f"P{n}": (name, title, less("sixth", ARMS[title], name))
        for n, (name, title) in enumerate(
            itertools.product(("gain", "easy"), ("SFT", "control")), start=1
        )
    }
    p = {}
    for name, (_, _, x) in pairs.items():
        t = statistics.mean(x) / (statistics.stdev(x) / len(x) ** 0.5)
        p[name] = 2 * stats.t.sf(abs(t), len(x) - 1)
    holm, largest = {}, 0.0
    for n, name in enumerate(sorted(p, key=p.get)):
        largest = holm[name] = max(largest, min(1, p[name] * (4 - n)))
    for name, (measure, title, x) in pairs.items():
        flips = [
            abs(sum(sign * value for sign, value in zip(signs, x, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(x))
        ]
        exact = sum(flip >= abs(sum(x)) - 1e-9 for flip in flips) / len(flips)
        equal = abs(statistics.mean(x)) + half_width(x, 0.9) < {"gain": 1.5, "easy": 3}[measure]
        assert (
            f"**{name}** ({measure}, {title}): {shown(x)}, p {p[name]:.3g}, Holm {holm[name]:.2g},"
            f" sign flips {exact:.3g}; equal: {'yes' if equal else 'no'}"
        ) in PAGE


def after_as_many_tokens(seed: int) -> float:
    """Gain of the fifth's SFT where it has trained on as many solution tokens as OSW-FT had."""
    sft, found = RUNS["fifth", "S", "A", seed], []
    for tokens in (p["solution_tokens"] for p in RUNS["fifth", "S", "B", seed] if p["step"] >= 40):
        low = max((p for p in sft if p["solution_tokens"] <= tokens), key=lambda p: p["step"])
        high = min((p for p in sft if p["solution_tokens"] > tokens), key=lambda p: p["step"])
        span = high["solution_tokens"] - low["solution_tokens"]
        share = (tokens - low["solution_tokens"]) / span
        found.append((1 - share) * pass_at_1(low, *GAIN) + share * pass_at_1(high, *GAIN))
    return statistics.mean(found)


def retention(arm: str, seed: int) -> float:
    """pass@1 in regime O on the problems that training never shows: steps 40, 50 and 60."""
    points = [p for p in RUNS["fifth", "O", arm, seed] if p["step"] in STEPS["fifth"]]
    return statistics.mean(pass_at_1(p, "kept_held") for p in points)


def tflops(point: dict) -> float:
    read = point["sampled_tokens"] + point["read_tokens"]
    return 134.5e6 * (6 * point["train_tokens"] + 2 * read) / 1e12


def test_the_text_says_what_the_rows_say():
    five = range(5)
    tokens = [measured("fifth", "B", n, "gain") - after_as_many_tokens(n) for n in five]
    said = [f"At equal solution tokens the fifth's OSW-FT gained {shown(tokens)}"]
    kept = {arm: [retention(arm, n) for n in five] for arm in "ABC"}
    ends = [f"{statistics.mean(kept[arm]):.1f}" for arm in "BAC"]
    said.append("OSW-FT ended at {}, SFT at {}, the control at {}".format(*ends))
    lost = [[a - b for a, b in zip(kept[arm], kept["B"], strict=True)] for arm in "AC"]
    said.append("{} below SFT, {} below the control".format(*(shown(x, ".1f") for x in lost)))
    base = BASES["fifth", "O"]
    said.append(f"The base has {pass_at_1(base, 'kept_held'):.1f}")
    early = [RUNS["fifth", "O", "A", n][0] for n in five]
    assert [point["step"] for point in early] == [20] * 5
    left = statistics.mean(pass_at_1(point, "kept_held") for point in early)
    style = 100 * statistics.mean(point["style"] for point in early)
    said.append(f"SFT's was {left:.1f} after 20 steps already, with {style:.0f} % of its answers")
    for arm in "ABC":
        points = [p for n in five for p in RUNS["fifth", "O", arm, n] if p["step"] >= 40]
        assert statistics.mean(p["style"] for p in points) > 0.97
    said.append("at the end over 97 % were, in each arm")
    gate = BASES["sixth", "S"]["gate"]["weights"]
    said.append("{:.0f} % are 0, {:.0f} % are 1".format(*(100 * gate[w] for w in ("0.0", "1.0"))))
    spent = {
        arm: statistics.mean(
            tflops(p) for n in five for p in RUNS["fifth", "S", arm, n] if p["step"] >= 40
        )
        for arm in "ABC"
    }
    said.append("SFT {:.0f}, OSW-FT {:.0f}, the control {:.0f} TFLOP".format(*spent.values()))
    gain, easy = less("sixth", "A", "gain"), less("sixth", "A", "easy")
    worst = [-(statistics.mean(x) - half_width(x)) for x in (gain, easy)]
    assert f"{statistics.mean(gain) + half_width(gain):.3f}" == "-0.002"
    said.append("That interval ends below 0 by 0.002 points")
    said.append(f"at most {worst[0]:.1f} points worse, and not better")
    said.append(f"so at most {worst[1]:.1f} below")
    trained = {
        arm: sum(RUNS["sixth", "S", arm, n][-1]["train_tokens"] for n in seeds("sixth"))
        for arm in "ABC"
    }
    said.append(f"{100 * (trained['A'] / trained['B'] - 1):.0f} % more tokens")
    said.append(f"{100 * (1 - trained['C'] / trained['B']):.0f} % fewer tokens")
    last = {
        arm: [pass_at_1(RUNS["sixth", "S", arm, n][-1], *GAIN) for n in seeds("sixth")]
        for arm in "BC"
    }
    said.append(
        f"Gain at step 60 alone: {shown([b - c for b, c in zip(*last.values(), strict=True)])}"
    )
    easy = {
        arm: [greedy(RUNS["fifth", "S", arm, n][-1], "easy_held") for n in five] for arm in "AB"
    }
    worse = shown([a - b for a, b in zip(*easy.values(), strict=True)], ".1f")
    said.append(f"greedily the fifth's easy score was {worse} below SFT's")
    for text in said:
        assert text in PAGE, text
    lower = [shown([-value for value in less(s, "A", "gain")], ".1f") for s in ("sixth", "fifth")]
    lower.append(shown([-value for value in less("sixth", "A", "greedy")], ".1f"))
    assert (
        "gain {0} points lower (95 %, six pairs; Holm's p: 0.15), greedily {2}".format(*lower)
        in README
    )
    assert f"Another study, T = 1: {lower[1]} lower" in README
    assert f"retention {shown(lost[0], '.1f')} lower, too" in README
