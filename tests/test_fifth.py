"""The fifth study's problems, its arm C, and what its rows count (real/); its runs take hours."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from conftest import SHARED, call_of, launch, metrics, needs_shared, needs_vllm, rollouts, slow
from data import InputError, read_rows, write_rows
from real import fifth, problems, study
from real.score import EQUATION
from real.yoked import logged_weights
from run import write_args
from verify import is_correct

import pytest


@needs_shared
def test_the_sets_have_the_planned_sizes_right_solutions_and_no_question_twice(tmp_path):
    problems.main(SHARED / "data", tmp_path)
    sets = {path.stem: [row for _, row in read_rows(str(path))] for path in tmp_path.iterdir()}
    sizes = {"real_held": 256, "easy_held": 128, "middle_held": 128, "kept_held": 128}
    sizes |= {"S_train": 1920, "O_train": 1920, "S_base": 3000, "O_base": 3000}
    assert {name: len(rows) for name, rows in sets.items()} == sizes
    kinds = {name: Counter(row["source"] for row in rows) for name, rows in sets.items()}
    assert kinds["S_train"]["easy"] == kinds["S_train"]["middle"] == 640
    assert kinds["O_train"]["easy"] == 1280 and "kept" not in kinds["O_train"]
    assert kinds["S_base"] == {"easy": 1500, "two": 1500}
    assert kinds["O_base"] == {"easy": 1500, "kept": 1500}
    for regime in "SO":
        used = ("real_held", "easy_held", "middle_held", "kept_held")
        used += (f"{regime}_train", f"{regime}_base")
        questions = [row["question"] for name in used for row in sets[name]]
        assert len(set(questions)) == len(questions)
    for name, rows in sets.items():
        for row in rows:
            assert is_correct(row["solution"], row["answer"]), row
            equation = EQUATION.fullmatch(row["solution"].split("\n")[0])
            assert bool(equation) == (name != "O_base"), row
            numbers = [int(n) for n in re.findall(r"\d+", row["question"])]
            if row["source"] in ("easy", "kept"):
                assert max(numbers) <= 25 and min(numbers) >= 2


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(InputError, match="svamp"):
        problems.main(tmp_path)


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
        launch("-m", "real.yoked", *call, *flags, *yoked)
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
    for order, arm in (("B", "B"), ("dealt", "C")):
        sums = study.spent(tmp_path / order, arm, seed=0, batch_size=24)
        assert [s["train_tokens"] for s in sums][-1] == sum(
            m["train_tokens"] for m in metrics(tmp_path / order)
        )
        assert 0 < sums[-1]["solution_tokens"] < sums[-1]["train_tokens"]
    others = [SimpleNamespace(id=id) for id in reversed(weights)]
    with pytest.raises(InputError, match="is of another batch"):
        logged_weights(tmp_path / "B", step, others)


def make_rows(regime: str, seed: int, **shares: float) -> list[dict]:
    """The rows of a triple: each arm solves this share of every problem's four answers."""
    rows = []
    for arm, (start, end) in shares.items():
        points = []
        for step in study.COUNTED[arm]:
            count = round(start + (end - start) * (step - 20) / 40)
            names = ("kept_held",) if regime == "O" else ("real_held", "middle_held")
            sums = {"solution_tokens": 10 * step * (1 if arm == "A" else 0.5), "seconds": step}
            sums |= {"train_tokens": step, "sampled_tokens": 0, "read_tokens": 0}
            counts = {name: [count] * 100 + [0] * 300 for name in names}
            points.append({"step": step, "counts": counts, **sums})
        rows.append({"regime": regime, "arm": arm, "seed": seed, "base_hash": "a"})
        rows[-1]["checkpoints"] = points
    return rows


def test_the_report_says_nothing_before_the_last_triple_and_then_what_was_worked_out_by_hand():
    rows = []
    for regime in "SO":
        for seed in range(5):
            assert_missing(rows, f"{regime}{seed}")
            # of a quarter of the problems, 0 to 4 answers are right: one of them is 6.25 points
            rows += make_rows(regime, seed, A=(0, 4), B=(4, 4), C=(2, 2))
    triples = fifth.read_triples(rows)
    assert [len(triples[regime]) for regime in "SO"] == [5, 5]
    # steps 40, 50, 60: A has 2, 3, 4 right, B 4, C 2; at half the tokens A has 0, 0.5, 1
    worked = {"S1": 12.5, "S2": 6.25, "S3": 6.25 * (4 - 0.5), "O1": 12.5, "O2": 6.25}
    for name, points in worked.items():
        assert fifth.difference(name, triples["SO"["O" in name]][0]) == pytest.approx(points), name
    noise = [-1.0, -0.5, 0.0, 0.5, 1.0]
    x = iter([m + e for m in (2.0, 0.0, 0.0, 0.0, 3.0) for e in noise])
    lines = fifth.test_table(triples, difference=lambda *_: next(x))
    cells = [line.strip("| ").split(" | ") for line in lines]
    # Student, four degrees of freedom: 2.776 * 0.7906 / sqrt(5) = 0.98, and 2.132 for 90 %: 0.75
    means = ("+2.0", "+0.0", "+0.0", "+0.0", "+3.0")
    assert [row[3] for row in cells] == [f"{mean} ± 1.0" for mean in means]
    assert [row[7] for row in cells] == ["not shown to be equal", *["equal"] * 4]
    assert [row[6] for row in cells][::4] == ["0.062", "0.062"]  # 2 of 32 ways to flip the signs


def test_the_rates_of_sft_are_counted_without_logged_weights(tiny, tmp_path):
    settings = {"model": str(tiny / "model"), "data": str(tiny / "train.jsonl")}
    write_args(tmp_path, args={**settings, "max_length": 128, "max_completion_length": 48})
    rows = [{"train_tokens": 1176, "train_s": 1.0}] * 2  # as SFT counts two batches of 24
    write_rows(rows, tmp_path / "metrics.jsonl")
    _, sums = study.spent(tmp_path, "rate", seed=0, batch_size=24)
    assert (sums["train_tokens"], sums["solution_tokens"], sums["seconds"]) == (2352, 1536, 2)


def test_time_may_end_the_study_before_its_second_regime():
    rows = [row for seed in (0, 1) for row in make_rows("S", seed, A=(0, 4), B=(4, 4), C=(2, 2))]
    triples = fifth.read_triples(rows, ended=True)
    assert len(fifth.arm_table("S", triples["S"])) == 6 and fifth.arm_table("O", []) == []
    assert len(fifth.test_table(triples, lambda name, arms: arms["A"]["seed"] / 10)) == 3


def assert_missing(rows: list[dict], first: str) -> None:
    with pytest.raises(InputError, match=f"nothing is read: {first}"):
        fifth.read_triples(rows)
    fifth.read_triples(rows, ended=True)
