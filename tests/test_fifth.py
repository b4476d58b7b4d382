"""The fifth study's arm C, and what is made of its rows (paper/)."""

from pathlib import Path
from types import SimpleNamespace

from conftest import call_of, launch, metrics, needs_vllm, rollouts, slow
from data import InputError, read_rows
from paper import fifth
from paper.yoked import logged_weights

import pytest
from scipy import stats


@slow
@needs_vllm
def test_arm_c_has_the_weights_and_batches_of_b_and_with_its_own_order_takes_b_s_steps(
    tiny, tmp_path
):
    flags = ("--max_steps", 3, "--train_batch_size", 24, "--save_every", 10)
    launch(*call_of("train_oswft.py", tiny, tmp_path / "B"), *flags, "--rollout_batch_size", 24)
    _, *call = call_of("train_sft.py", tiny, tmp_path / "C")
    for order in ("own", "dealt"):
        yoked = ("--weights_of", tmp_path / "B", "--order", order, "--output_dir", tmp_path / order)
        launch("-m", "paper.yoked", *call, *flags, *yoked)
    moved = 0
    for step in (1, 2, 3):
        weights = {row["id"]: row["weight"] for row in rollouts(tmp_path / "B", step)}
        path = Path("weights") / f"step_{step:06d}.jsonl"
        own, dealt = (
            {row["id"]: row["weight"] for _, row in read_rows(str(tmp_path / order / path))}
            for order in ("own", "dealt")
        )
        assert own == weights and [*dealt] == [*weights]
        assert sorted(dealt.values()) == sorted(weights.values())
        moved += dealt != weights
    assert moved == 3
    final = "final/model.safetensors"
    assert (tmp_path / "own" / final).read_bytes() == (tmp_path / "B" / final).read_bytes()
    assert (tmp_path / "dealt" / final).read_bytes() != (tmp_path / "B" / final).read_bytes()
    for ours, theirs in zip(metrics(tmp_path / "dealt"), metrics(tmp_path / "B"), strict=True):
        for name in ("mean_weight", "skipped_sequences"):
            assert ours[name] == theirs[name]
    others = [SimpleNamespace(id=id) for id in reversed(weights)]
    with pytest.raises(InputError, match="is of another batch"):
        logged_weights(tmp_path / "B", step, others)


def make_rows(regime: str, seed: int, **shares: tuple[int, int]) -> list[dict]:
    """The rows of a triple, and its base's: right answers, from step 20 to 60, to some problems."""
    names = ("kept_held",) if regime == "O" else ("real_held", "middle_held")
    counts = {name: [1] * 100 + [0] * 300 for name in names}
    rows = [{"regime": regime, "arm": "base", "base_hash": regime, "counts": counts}]
    for arm, (start, end) in shares.items():
        points = []
        for step in (20, 30, 40, 50, 60):
            count = round(start + (end - start) * (step - 20) / 40)
            sums = {"solution_tokens": 10 * step * (1 if arm == "A" else 0.5), "seconds": step}
            sums |= {"train_tokens": step, "sampled_tokens": 0, "read_tokens": 0}
            counts = {name: [count] * 100 + [0] * 300 for name in names}
            points.append({"step": step, "counts": counts, **sums})
        rows.append({"regime": regime, "arm": arm, "seed": seed, "base_hash": regime})
        rows[-1]["checkpoints"] = points
    return rows


def test_the_report_says_nothing_before_the_last_triple_and_then_what_was_worked_out_by_hand():
    rows = []
    for regime in "SO":
        for seed in range(5):
            assert_missing(rows, f"{regime}{seed}")
            # of a quarter of the problems, 0 to 4 answers are right: one of them is 6.25 points
            rows += make_rows(regime, seed, A=(0, 4), B=(4, 4), C=(2, 2))
    points = fifth.read_points(rows)
    # steps 40, 50, 60: A has 2, 3, 4 right, B 4, C 2; at half the tokens A has 0, 0.5, 1
    worked = {"S1": 12.5, "S2": 6.25, "S3": 6.25 * (4 - 0.5), "O1": 12.5, "O2": 6.25}
    for name, value in worked.items():
        assert fifth.differences(name, points) == pytest.approx([value] * 5), name
    means = points[points.regime == "S"].groupby(["arm", "step"]).mean(numeric_only=True)
    assert means.loc["A", 50].goal == pytest.approx(18.75) == means.loc["A", 50].middle_held
    assert means.loc["base", 0].goal == pytest.approx(6.25)
    assert means.loc["base", 0]["goal, pass@4"] == means.loc["C", 40]["goal, pass@4"] == 25
    assert means.loc["A", 60].TFLOPs == pytest.approx(134.5e6 * 6 * 60 / 1e12)
    noise = [-1.0, -0.5, 0.0, 0.5, 1.0]
    x = {name: [m + e for e in noise] for name, m in zip(worked, (2, 0, 0, 0, 3), strict=True)}
    table = fifth.test_table(x)
    # Student, four degrees of freedom: 2.776 * 0.7906 / sqrt(5) = 0.98, and 2.132 for 90 %: 0.75
    assert [*table["mean"]] == pytest.approx([2, 0, 0, 0, 3])
    assert [*table["±"]] == pytest.approx([0.9816] * 5, abs=1e-3)
    assert [*table["equal"]] == [False, True, True, True, True]  # so far for O2: 3.75 of 4
    assert [*table["exact"]][::4] == [0.0625] * 2  # 2 of 32 ways to flip the signs
    t = 3 / (0.7906 / 5**0.5)  # O2's p is the smallest: times five; S1's times four
    assert table.p["O2"] == pytest.approx(2 * stats.t.sf(t, 4), rel=1e-3)
    assert table.Holm["O2"] == pytest.approx(5 * table.p["O2"])
    assert table.Holm["S1"] == pytest.approx(4 * table.p["S1"]) and table.Holm["S3"] == 1


def test_time_may_end_the_study_before_its_second_regime():
    rows = [row for seed in (0, 1) for row in make_rows("S", seed, A=(0, 4), B=(4, 4), C=(2, 2))]
    points = fifth.read_points(rows, ended=True)
    assert fifth.differences("O1", points) == []
    table = fifth.test_table({name: [1.0, 1.1] for name in ("S1", "S2")})
    assert [*table.triples] == [2, 2] and [*table.Holm] == pytest.approx([5 * table.p["S1"]] * 2)


def assert_missing(rows: list[dict], first: str) -> None:
    with pytest.raises(InputError, match=f"nothing is read: {first}"):
        fifth.read_points(rows)
    fifth.read_points(rows, ended=True)
