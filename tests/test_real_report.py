"""The fourth study's verdicts, from its rows (real/report.py)."""

import itertools
import statistics

from conftest import ROOT
from data import read_rows
from real import report

import numpy as np
import pytest


def test_runs_are_compared_at_equal_gain_and_in_pairs():
    base = {"run": "base", "base_hash": "a", "gain": 0.0, "kl": 0.0, "style": 0.0}
    rows = [base, {**base, "base_hash": "b"}]
    rows += [{"run": "sft-0.1", "base_hash": "a", "seed": 9, "checkpoints": [{"gain": 0.4}]}]
    levels = report.levels_of(rows)
    assert levels == pytest.approx([0.2, 0.3])
    spent = {"step": 10, "train_tokens": 1000, "rollout_tokens": 0, "seconds": 1}
    slopes = {"sft": 2, "oswft": 1, "half": 1, "static": 1}
    for name, (arm, slope) in itertools.product("ab", slopes.items()):
        shift = 0.01 * (name == "b")
        points = [{"gain": g, "kl": slope * g + shift, "style": g} | spent for g in (0.1, 0.5)]
        rows.append({"run": arm, "base_hash": name, "seed": 0, "checkpoints": points})
    alone = {"run": "oswft", "base_hash": "a", "seed": 1, "checkpoints": [{"gain": 0.9, **spent}]}
    curves = report.read_curves([*rows, alone])
    tflops = [curves[arm, "a", 0].TFLOPs.iloc[-1] for arm in ("sft", "oswft")]
    assert tflops == pytest.approx([0.807, 0.807 + 2 * 134.5e6 * 10 * 64 * 79.6 / 1e12])
    sft = curves["sft", "a", 0]
    assert report.score(sft, "kl", levels) == pytest.approx(0.5)
    assert report.score(sft, "kl", [0.3, 0.6]) == pytest.approx(0.6)  # reaches the first alone
    assert report.score(sft, "kl", [0.6]) == 1.0  # reaches none: its last
    lines = [line.split(" | ") for line in report.tests(curves, levels)]
    assert [line[4] for line in lines] == ["-0.250 ± 0.000", *3 * ["+0.000 ± 0.000"]]
    assert [line[5] for line in lines] == 4 * ["2"]  # pairs


def test_the_page_has_the_results_of_the_rows():
    page = (report.ROWS.parent / "fourth.md").read_text()
    rows = [row for _, row in read_rows(str(report.ROWS))]
    ends = [row["checkpoints"][-1] for row in rows if row["run"] in report.ARMS]
    assert len(ends) == 10
    for end in ends:
        gain, many, easy, skill = (100 * end[name] for name in ("gain", "pass@4", "easy", "skill"))
        kl, trained = end["kl"], end["train_tokens"]
        cells = f"{gain:.1f} | {many:.1f} | {kl:.3f} | {easy:.1f} | {skill:.1f} | {trained:,}"
        assert f" | {cells} | " in page
    curves, levels = report.read_curves(rows), report.levels_of(rows)
    for name, *_, mean, pairs, p, holm, exact in [
        line.strip("| ").split(" | ") for line in report.tests(curves, levels)
    ]:
        if name in ("R3", "R4"):  # the page has points
            mean = "{:+.1f} ± {:.1f}".format(*(100 * float(x) for x in mean.split(" ± ")))
        mean = mean.replace("-", "−")
        if name in ("R1", "R3"):
            assert f" {mean[1:]} " in said("docs/study.md")
        assert f" | {mean} | {pairs} | {p} | {holm} | {exact} |" in page


@pytest.fixture(scope="module")
def curves():
    """By (arm, seed): the base, then the run's checkpoints."""
    rows = [row for _, row in read_rows(str(report.ROWS))]
    return {(arm, seed): curve for (arm, _, seed), curve in report.read_curves(rows).items()}


@pytest.fixture(scope="module")
def at_equal_gain(curves):
    levels = report.levels_of([row for _, row in read_rows(str(report.ROWS))])
    return {
        key: {x: report.score(c, x, levels) for x in report.SCORES} for key, c in curves.items()
    }


def said(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def interval(values: list[float]) -> str:
    width = {2: 12.706, 3: 4.303}[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.1f} ± {width:.1f}".replace("-", "−")


def test_means_of_arms_are_over_the_seeds_that_have_all_of_them(curves, at_equal_gain):
    half, static = "SFT at r / 2 with twice the steps", "weights from one weighing of the base"
    names = {"sft": "SFT reached", "oswft": "OSW-FT", "half": half, "static": static}
    assert f"the base has {100 * curves['sft', 1].gain.iloc[0]:.1f} %" in said("docs/study.md")
    for arm in report.ARMS:
        gain = f"{50 * sum(curves[arm, seed].gain.iloc[-1] for seed in (1, 2)):.1f}"
        assert f"{names[arm]} {gain} %" in said("docs/study.md").split("have all arms (1 and 2)")[1]
        mean = {x: statistics.mean(at_equal_gain[arm, n][x] for n in (1, 2)) for x in report.SCORES}
        scores = ("pass@4", "easy", "skill", "multiarith", "commonsense")
        many, *cells = (f"{100 * mean[name]:.1f}" for name in scores)
        cells = [many, f"{mean['kl']:.3f}", *cells, f"{mean['TFLOPs']:.0f}"]
        cells += [f"{at_equal_gain[arm, 1]['seconds']:,.0f}"]
        assert f" | {' | '.join(cells)} |" in said("docs/study/fourth.md")


def test_the_page_says_how_far_the_arms_are_apart(curves, at_equal_gain):
    page = said("docs/study/fourth.md")
    easy = {key: 100 * curve.easy for key, curve in curves.items()}
    below = [(easy["sft", n] - easy["oswft", n])[2:].mean() for n in (0, 1, 2)]  # steps 20 to 60
    assert f"OSW-FT is {interval(below)[1:]} points below SFT" in page
    assert f"easy {interval([-value for value in below[1:]])}" in page
    ends = [easy["sft", n].iloc[-1] - easy["static", n].iloc[-1] for n in (1, 2)]
    assert "they end {:.1f} and {:.1f} points below SFT".format(*ends) in page
    for arm, where in (
        ("half", "is itself {} below SFT's"),
        ("static", "at equal gain is {} above"),
    ):
        kl = [abs(at_equal_gain[arm, n]["kl"] - at_equal_gain["sft", n]["kl"]) for n in (1, 2)]
        assert where.format("{:.3f} and {:.3f}".format(*kl)) in page
    plateau = [kl for (arm, _), curve in curves.items() if arm != "half" for kl in curve.kl[2:]]
    assert f"from step 20 on ({min(plateau):.2f} to {max(plateau):.2f})" in page


def test_oswft_is_compared_with_sft_after_as_many_tokens(curves):
    page, gains, shares = said("docs/study/fourth.md"), [], []
    for seed in (0, 1, 2):
        sft, end = curves["sft", seed], curves["oswft", seed].iloc[-1]
        same = np.interp(end.train_tokens, sft.train_tokens, sft.gain)
        gains.append((100 * end.gain, 100 * same))
        shares.append(100 * end.train_tokens / sft.train_tokens.iloc[-1])
    difference = interval([ours - theirs for ours, theirs in gains])
    means = "{:.1f} and {:.1f} %".format(*map(statistics.mean, zip(*gains, strict=True)))
    share = f"on {statistics.mean(shares):.0f} % of SFT's tokens"
    assert share in page and share in said("docs/study.md")
    assert f"{means} ({difference}, three pairs)" in page
    assert f"from as many ({difference})" in said("docs/study.md")
