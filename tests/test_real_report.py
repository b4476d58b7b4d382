"""The fourth study's verdicts, from its rows (real/report.py)."""

import itertools

import pytest

from data import read_rows
from real import report


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
        assert f" | {mean} | {pairs} | {p} | {holm} | {exact} |" in page
