"""Scores and their error bars; what an evaluation keeps, and how it goes on; what it refuses."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import evaluate
from benchmarks import BENCHMARKS
from conftest import NO_CPU_VLLM, ROOT, SHARED, launch, needs_shared, needs_vllm
from data import InputError, write_rows
from demo.world import NUM_HELDOUT
from evaluate import Args, pass_at_k
from paper import label, tables

# ---- the estimator


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_equals_the_mean_over_all_subsets(n, c):
    answers = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, 5])
def test_more_answers_than_samples_are_refused(k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(4, 1, k)


# ---- intervals


def binomial_quantile(n: int, p: float, q: float) -> int:
    cumulative = 0.0
    for successes in range(n + 1):
        cumulative += math.comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        if cumulative >= q:
            return successes
    return n


@pytest.mark.parametrize(("right", "problems"), [(20, 100), (150, 300), (3, 30)])
def test_with_one_answer_each_the_interval_is_that_of_a_binomial(right, problems):
    counts = np.array([1] * right + [0] * (problems - right))
    estimate, (low, high) = evaluate.score_with_interval(counts, 1, 1)
    assert estimate == right / problems
    for bound, q in ((low, 0.025), (high, 0.975)):
        exact = binomial_quantile(problems, right / problems, q) / problems
        assert bound == pytest.approx(exact, abs=1.5 / problems)  # drawn, not enumerated


def test_answers_are_drawn_anew_within_a_problem_for_k_above_1_and_the_estimate_stays_the_centre():
    counts = np.full(400, 1)  # the problems are all alike: only the answers to them vary
    assert evaluate.score_with_interval(counts, 4, 1) == (0.25, (0.25, 0.25))
    lost = 0.75**4  # none of the four draws is the right answer
    estimate, (low, high) = evaluate.score_with_interval(counts, 4, 4)
    assert estimate == 1 and high == 1
    half_width = 1.96 * math.sqrt(lost * (1 - lost) / 400)
    assert low == pytest.approx(1 - half_width, abs=0.005)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_95_of_100_intervals_hold_the_true_score(k, monkeypatch):
    monkeypatch.setattr(evaluate, "RESAMPLES", 500)
    rng = np.random.default_rng(0)
    truth = np.mean(1 - (1 - rng.beta(0.3, 1.2, size=200_000)) ** k)
    hits = 0
    for _ in range(300):
        counts = rng.binomial(16, rng.beta(0.3, 1.2, size=30))  # like AIME
        low, high = evaluate.score_with_interval(counts, 16, k)[1]
        hits += low <= truth <= high
    assert 0.90 <= hits / 300 <= 0.98


def test_no_interval_leaves_its_estimate_or_the_possible_range():
    rng = np.random.default_rng(0)
    for n in (1, 4, 16):
        for _ in range(20):
            counts = rng.binomial(n, rng.beta(2, 0.3, size=10))
            for k in {1, n // 2 or 1, n}:
                estimate, (low, high) = evaluate.score_with_interval(counts, n, k)
                assert 0 <= low <= estimate <= high <= 1


def test_a_difference_is_tested_by_swapping_the_two_in_each_problem():
    wins = np.array([1, 1, 1, 1, 1]), 1
    losses = np.array([0, 0, 0, 0, 0]), 1
    difference, interval, p_value = tables.paired_difference(losses, wins, 1)
    assert difference == 1 and interval == (1, 1)
    assert p_value == pytest.approx(2 / 2**5, abs=0.01)  # two of the 32 ways to swap
    difference, interval, p_value = tables.paired_difference(wins, wins, 1)
    assert difference == 0 and interval == (0, 0) and p_value == 1


def test_of_two_equal_models_few_differ_significantly(monkeypatch):
    monkeypatch.setattr(evaluate, "RESAMPLES", 300)
    rng = np.random.default_rng(0)
    significant = 0
    for _ in range(300):
        chances = rng.beta(0.3, 1.2, size=30)
        pair = [(rng.binomial(16, chances), 16) for _ in range(2)]
        significant += tables.paired_difference(*pair, 1)[2] < 0.05
    assert 0.01 <= significant / 300 <= 0.09


def test_pairing_takes_the_problems_difficulty_out_of_the_interval():
    rng = np.random.default_rng(0)
    chances = rng.beta(0.3, 0.3, size=60)  # easy ones and hard ones
    first = rng.binomial(16, 0.9 * chances)
    second = rng.binomial(16, chances)
    difference, (low, high), p_value = tables.paired_difference((first, 16), (second, 16), 1)
    alone = [evaluate.score_with_interval(counts, 16, 1)[1] for counts in (first, second)]
    assert 0 < low < difference < high and p_value < 0.01
    assert high - low < 0.4 * max(upper - lower for lower, upper in alone)
    assert alone[0][1] > alone[1][0]  # the two intervals overlap all the same


# ---- what is kept, and what follows from it


def settings(tiny: Path, **values) -> list[str]:
    """Sampling of the held-out tiers in seconds: 144 problems, 8 answers to each."""
    heldout = [tiny / "heldout" / f"{tier}.jsonl" for tier in ("easy", "middle", "hard")]
    values = {"model": tiny / "model", "benchmark_file": heldout, "num_samples": 8} | values
    values |= {"max_completion_length": 48, "precision": "fp32", "temperature": 1}
    values |= {"top_p": 1, "top_k": 0}
    words = []
    for name, value in values.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def call(*args, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, "evaluate.py", *map(str, args)]
    env = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def start_and_wait_for_answers(folder: Path, tiny: Path, **values) -> subprocess.Popen:
    """An evaluation that has written some hundred answers."""
    command = [sys.executable, "evaluate.py", *settings(tiny, output_dir=folder, **values)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while sum(path.stat().st_size for path in folder.glob("samples/*.rank0")) < 50_000:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


def lines(folder: Path) -> set[str]:
    """All whole rows of an evaluation as they are written, with what a clock measured."""
    files = (folder / "samples").iterdir()
    return {line for path in files for line in path.open() if line.endswith("\n")}


def read(folder: Path) -> dict[str, list[dict]]:
    """The samples of an evaluation, without what a clock measured."""
    return {
        path.name: [{**json.loads(line), "seconds": None} for line in path.open()]
        for path in sorted((folder / "samples").iterdir())
    }


def results_of(folder: Path) -> dict[str, dict]:
    """The results of an evaluation, without what a clock measured."""
    results = json.loads((folder / "results.json").read_text())
    return {name: {**result, "tokens_per_second": None} for name, result in results.items()}


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    """An evaluation of the tiny model that was not disturbed."""
    if NO_CPU_VLLM:
        pytest.skip(NO_CPU_VLLM)
    folder = tmp_path_factory.mktemp("finished") / "eval"
    result = call(*settings(tiny, output_dir=folder))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "easy" in result.stdout and f"python -m paper.plot {folder}" in result.stdout
    assert json.loads((folder / "args.json").read_text())["vllm_runner"] == "V1"
    return folder


def test_the_tiny_model_knows_the_easy_tier_and_the_middle_and_the_hard_partly(finished):
    results = json.loads((finished / "results.json").read_text())
    assert {result["problems"] for result in results.values()} == {NUM_HELDOUT}
    easy, middle, hard = (results[tier]["pass@1"] for tier in ("easy", "middle", "hard"))
    assert easy > 0.9 and 0.85 > middle > hard > 0.2
    for tier, result in results.items():
        rows = [json.loads(line) for line in (finished / "samples" / f"{tier}.jsonl").open()]
        total = 8 * NUM_HELDOUT
        assert len(rows) == total == len({(row["id"], row["sample"]) for row in rows})
        assert result["pass@1"] == pytest.approx(sum(row["correct"] for row in rows) / total)
        tokens = [row["tokens"] for row in rows]
        assert result["completion_length_mean"] == pytest.approx(sum(tokens) / total)
        cut = [row for row in rows if row["finish_reason"] == "length"]
        assert result["truncated_share"] == len(cut) / total
        assert result["no_answer_share"] == sum(row["extracted"] is None for row in rows) / total
        assert all(row["extracted"] == row["answer"] for row in rows if row["correct"])
        curve = [result[f"pass@{k}"] for k in range(1, 9)]
        assert curve == sorted(curve)
        for k in range(1, 9):
            low, high = result[f"pass@{k}_interval"]
            assert 0 <= low <= result[f"pass@{k}"] <= high <= 1


def test_an_evaluation_that_was_killed_goes_on_and_ends_as_one_that_was_not(
    finished, tiny, tmp_path
):
    folder = tmp_path / "eval"
    process = start_and_wait_for_answers(folder, tiny)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    part = max(folder.glob("samples/*.rank0"), key=lambda path: path.stat().st_size)
    whole = part.read_text().splitlines(keepends=True)
    part.write_text("".join(whole)[:-20])  # half a row, as a crash may leave one
    (folder / "samples" / "easy.jsonl.partial").write_text("half a file")
    kept = lines(folder)
    assert 0 < len(kept) < 3 * NUM_HELDOUT * 8

    command = [sys.executable, "-m", "paper.tables", "score", folder]
    unfinished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert unfinished.returncode == 1 and not (folder / "results.json").exists()
    assert f"{part.name.partition('.')[0]} is not complete, {len(whole) - 1} answers are good" in (
        unfinished.stderr
    )

    again = call(*settings(tiny, output_dir=folder))
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"{part}:{len(whole)}: damaged" in again.stderr
    assert kept <= lines(folder)  # they were not sampled again: their times are the same
    assert read(folder) == read(finished)
    assert results_of(folder) == results_of(finished)


def test_ctrl_c_keeps_what_was_answered_with_the_right_verdicts(finished, tiny, tmp_path):
    folder = tmp_path / "eval"
    process = start_and_wait_for_answers(folder, tiny, num_samples=32)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped: " in errors and "Traceback" not in errors
    expected = [row for rows in read(finished).values() for row in rows]
    kept = [row for rows in read(folder).values() for row in rows if row["sample"] < 8]
    assert kept and all(row in expected for row in kept)


def test_two_ranks_answer_every_problem_once_and_alike(finished, tiny, tmp_path):
    folder = tmp_path / "an evaluation"
    output = launch("evaluate.py", *settings(tiny, output_dir=folder), ranks=2)
    share = 3 * NUM_HELDOUT * 8 // 2
    assert "answering (rank 0 of 2): 100%" in output and f"{share}/{share}" in output
    assert read(folder) == read(finished)
    assert results_of(folder) == results_of(finished)


def test_results_follow_from_the_samples_alone(finished, tmp_path, capsys):
    folder = tmp_path / "eval"
    shutil.copytree(finished / "samples", folder / "samples")
    tables.score(folder)
    assert list(results_of(finished)) == ["easy", "middle", "hard"]  # as they were asked for
    assert json.loads((folder / "results.json").read_text()) == json.loads(
        (finished / "results.json").read_text()
    )
    assert capsys.readouterr().out.count("\n") == 6  # a blank line, head, three tiers, speed


def test_more_samples_are_added_to_those_that_are_there(finished, tiny, tmp_path):
    folder = tmp_path / "eval"
    shutil.copytree(finished, folder)
    hard = [tiny / "heldout" / "hard.jsonl"]
    result = call(*settings(tiny, output_dir=folder, benchmark_file=hard, num_samples=10))
    assert result.returncode == 0, result.stderr[-3000:]
    new = 2 * NUM_HELDOUT
    assert f"{new}/{new}" in result.stderr and lines(finished) < lines(folder)
    samples = {name: result["samples"] for name, result in results_of(folder).items()}
    assert samples == {"easy": 8, "middle": 8, "hard": 10}


def test_each_model_is_evaluated_into_a_folder_of_its_own(tmp_path, monkeypatch):
    run, models = tmp_path / "runs" / "oswft", tmp_path / "models"
    for folder in (run / "final", run / "checkpoint-000050", models / "A", models / "B"):
        folder.mkdir(parents=True)
    (run / "args.json").write_text('{"args": {}}')
    monkeypatch.chdir(tmp_path)
    for model, folder in [
        ("runs/oswft/final", run / "eval"),
        ("runs/oswft/checkpoint-000050/", run / "eval-checkpoint-000050"),
        (str(models / "A"), Path("runs/A/eval")),
        ("models/B", Path("runs/B/eval")),
        ("Qwen/Qwen3-4B", Path("runs/Qwen3-4B/eval")),
    ]:
        assert evaluate.default_folder(model) == folder
    names = [label(run / name) for name in ("", "eval", "eval-checkpoint-000050")]
    assert names == ["oswft", "oswft", "oswft-checkpoint-000050"]
    # An evaluation beside a model does not make it one of a run.
    (models / "args.json").write_text('{"args": {}, "protocol": {}}')
    assert evaluate.default_folder("models/A") == Path("runs/A/eval")


# ---- tables


def write_evaluation(folder: Path, right: dict[str, list[int]], num_samples: int) -> Path:
    """An evaluation of which only the counts of right answers matter."""
    for name, counts in right.items():
        rows = [
            evaluate.Sample(
                id=f"{name}-{n}",
                sample=k,
                correct=k < count,
                extracted="1" if k < count else None,
                answer="1",
                finish_reason="stop",
                tokens=10,
                seconds=0.5,
                fingerprint=str(n),
                text="…",
            )
            for n, count in enumerate(counts)
            for k in range(num_samples)
        ]
        write_rows([vars(row) for row in rows], folder / "samples" / f"{name}.jsonl")
    return folder


def test_the_table_has_a_row_for_each_run_and_the_papers_columns(tmp_path, capsys):
    aime = [16] * 3 + [1] * 3 + [0] * 24
    first = write_evaluation(tmp_path / "sft" / "eval", {"own": [8] * 4, "aime24": aime}, 16)
    second = write_evaluation(tmp_path / "oswft" / "eval", {"aime24": aime[::-1]}, 16)
    with pytest.raises(InputError, match="own has other problems or prompts than in"):
        tables.table((first, write_evaluation(tmp_path / "other", {"own": [8] * 5}, 16)))
    tables.table((first, second))
    head, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert head[1:] == ["AIME 24, Pass@1 / @16", "own, Pass@1 / @16 |"]
    assert [row[0] for row in rows] == ["| sft", "| oswft"]
    assert rows[0][1].startswith("10.6 [") and " / 20.0 [" in rows[0][1]
    assert rows[0][2] == "50.0 [50.0, 50.0] / 100.0 [100.0, 100.0] |" and rows[1][2] == "– |"
    tables.table((second,), k=(4,))
    assert "Pass@4" in capsys.readouterr().out


def test_a_benchmark_may_have_any_file_name(tmp_path):
    names = ["v1.5", "a b", "x[1]", "mine.jsonl.bak", "aime24_30"]
    folder = write_evaluation(tmp_path, {name: [1, 0] for name in names}, 1)
    tables.score(folder)
    assert list(results_of(folder)) == sorted(names)


def test_a_comparison_pairs_the_problems(tmp_path, capsys):
    first = write_evaluation(tmp_path / "sft" / "eval", {"own": [0, 4, 8, 8] * 10}, 8)
    second = write_evaluation(tmp_path / "oswft" / "eval", {"own": [1, 5, 8, 8] * 10}, 8)
    other = write_evaluation(tmp_path / "other" / "eval", {"own": [1, 5, 8]}, 8)
    tables.compare(first, second, k=(1,))
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| own | 1 | 62.5 | 68.8 | +6.2 [+4.") and row.endswith("| 0.0001 |")
    with pytest.raises(InputError, match="own has other problems or prompts than in"):
        tables.compare(first, other)
    with pytest.raises(InputError, match="--k 9: 8 answers to a problem allow k = 1 to 8"):
        tables.compare(first, second, k=(9,))
    for folder, protocol in (
        (first, {"temperature": 0.6, "date": "2024-02-28"}),
        (second, {"temperature": 1.0, "date": "2024-02-29"}),
    ):
        (folder / "args.json").write_text(json.dumps({"protocol": protocol}))
    tables.compare(first, second)
    notes = capsys.readouterr().err.splitlines()
    assert "differ in temperature" in notes[0] and "differ in date" in notes[1] and len(notes) == 2


def test_each_benchmark_gets_the_k_that_its_answers_allow():
    assert evaluate.choose_k((), {"aime24": 16, "math500": 1}) == {
        "aime24": (1, 16),
        "math500": (1,),
    }
    assert evaluate.choose_k((4, 8), {"aime24": 16, "math500": 1}) == {
        "aime24": (4, 8),
        "math500": (),
    }
    with pytest.raises(InputError, match="--k 2: 1 answers to a problem allow k = 1"):
        evaluate.choose_k((2,), {"math500": 1})


def test_a_damaged_line_is_named_and_the_good_rows_stay(tmp_path):
    folder = write_evaluation(tmp_path / "eval", {"own": [1, 2], "more": [1, 1]}, 2)
    path = folder / "samples" / "own.jsonl"
    good = path.read_text().splitlines(keepends=True)
    for damage in ("{half\n", "7\n", good[1].replace('"correct"', '"right"')):
        path.write_text("".join([good[0], damage, *good[2:]]))
        rows, _ = evaluate.read_samples(folder, "own")
        assert [vars(row) for row in rows] == [json.loads(good[n]) for n in (0, 2, 3)]
        with pytest.raises(InputError) as error:
            tables.score(folder)
        assert "own.jsonl:2: damaged" in str(error.value)
        assert "own is not complete, 3 answers are good" in str(error.value)
        assert list(results_of(folder)) == ["more"]
        (folder / "samples" / "more.jsonl").rename(tmp_path / "more.jsonl")
        with pytest.raises(InputError, match="own is not complete"):
            tables.score(folder)
        assert not (folder / "results.json").exists()  # of what was complete before
        (tmp_path / "more.jsonl").rename(folder / "samples" / "more.jsonl")
        with pytest.raises(InputError, match="own is not complete"):
            tables.compare(folder, folder)
        assert path.read_text().splitlines(keepends=True)[1] == damage


# ---- what is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": 0}, "--num_samples must be at least 1, got 0"),
        ({"max_completion_length": 0}, "--max_completion_length must be at least 1"),
        ({"temperature": -1.0}, "--temperature must not be below 0, got -1.0"),
        ({"top_p": 0.0}, "--top_p lies between 0 and 1, got 0.0"),
        ({"benchmarks": ("aime26",)}, "'aime26': the known ones are aime24, aime25, amc22"),
        ({"benchmarks": ("aime24",), "data_dir": "tests"}, "tests/aime24.jsonl: no such file"),
        ({"benchmark_file": (Path("absent.jsonl"),)}, "absent.jsonl: no such file"),
        ({"benchmark_file": ("hard", "hard")}, "another file is called hard as well"),
        ({"k": (9,)}, "--k 9: 8 answers to a problem allow k = 1 to 8"),
        ({"model": "tests"}, "tests: no tokenizer there"),
        ({"max_completion_length": 600}, "tokens is beyond the model's limit of 512 tokens"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(values, message, tiny, tmp_path):
    hard = tiny / "heldout" / "hard.jsonl"
    good = {"model": str(tiny / "model"), "benchmark_file": (hard,), "num_samples": 8}
    values = good | {"max_completion_length": 48} | values
    values["benchmark_file"] = tuple(hard if f == "hard" else f for f in values["benchmark_file"])
    with pytest.raises(InputError, match=re.escape(message)):
        evaluate.evaluate(Args(**values, output_dir=tmp_path / "eval"))
    assert not (tmp_path / "eval").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math500", "; or give a folder that has math500.jsonl with --data_dir"),
        ("gpqa_diamond", "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa,"),
    ],
)
def test_a_benchmark_that_cannot_be_reached_says_what_to_do(name, message, tiny):
    result = call(*settings(tiny, benchmark_file=[]), "--benchmarks", name, HF_HUB_OFFLINE="1")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert (
        result.stderr.splitlines()[-1].startswith(f"error: {name}: ") and message in result.stderr
    )


def test_answers_of_another_model_protocol_or_problem_are_not_mixed(finished, tiny, tmp_path):
    folder, model = tmp_path / "eval", tmp_path / "model"
    shutil.copytree(finished, folder)
    shutil.copytree(tiny / "model", model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # trained on
    (model / "model.safetensors").write_bytes(weights)
    easy, hard = (tiny / "heldout" / f"{tier}.jsonl" for tier in ("easy", "hard"))
    rows = [json.loads(line) for line in hard.open()]
    changed = tmp_path / "hard.jsonl"
    write_rows([{**rows[0], "question": "1+1"}, *rows[1:]], changed)
    training = tmp_path / "run"
    training.mkdir()
    (training / "args.json").write_text('{"args": {}}')
    args = {
        **{"model": str(tiny / "model"), "output_dir": folder, "num_samples": 9},
        **{"max_completion_length": 48, "precision": "fp32", "temperature": 1.0},
        **{"top_p": 1.0, "top_k": 0, "benchmark_file": (easy, hard)},
    }
    for values, message in [
        ({"seed": 1}, "another evaluation (seed 0 -> 1): choose another --output_dir"),
        ({"model": str(model)}, "another evaluation (model_version "),
        ({"benchmark_file": (easy, changed)}, f"problems of hard ('{rows[0]['id']}' is another"),
        ({"output_dir": training}, "run holds a training run: choose another --output_dir"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            evaluate.evaluate(Args(**{**args, **values}))
    assert lines(folder) == lines(finished) and results_of(folder) == results_of(finished)
    assert (folder / "args.json").read_text() == (finished / "args.json").read_text()
    # Where there is no answer yet, another protocol takes the folder over.
    empty = tmp_path / "empty"
    for seed in (0, 1):
        todo = evaluate.Args(**{**args, "output_dir": empty, "seed": seed})
        _, requests = evaluate.find_missing(todo, empty)
        assert len(requests) == 2 * NUM_HELDOUT * 9
    assert json.loads((empty / "args.json").read_text())["protocol"]["seed"] == 1


def test_the_version_of_a_model_on_the_hub_is_its_commit(tiny, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(tiny / "model", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    code = "import data, prompts, run; prompts.load_tokenizer(m := 'someone/tiny'); "
    code += "data.load_config(m, 512, 'a limit'); print(run.model_version(m))"
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.stdout.strip() == commit, result.stderr


# ---- real problems


@needs_shared
@needs_vllm
def test_real_problems_with_the_real_vocabulary(tmp_path):
    init = [
        "-m",
        "demo.tiny",
        "init",
        "--tokenizer",
        SHARED / "qwen3_tokenizer",
        "--max_length",
        "4096",
    ]
    subprocess.run(
        [sys.executable, *map(str, init), "--output_dir", tmp_path / "model"], cwd=ROOT, check=True
    )
    arguments = ["--model", tmp_path / "model", "--data_dir", SHARED / "data", "--num_samples", 1]
    # Without top-k and top-p: on a CPU they sort the whole vocabulary for every token.
    arguments += ["--max_completion_length", 16, "--top_p", 1, "--top_k", 0]
    own = SHARED / "data" / "amc23.jsonl"
    names = ["aime24", "aime25", "math500"]
    arguments += ["--output_dir", tmp_path / "eval"]
    result = call(*arguments, "--benchmarks", *names, "--benchmark_file", own)
    assert result.returncode == 0, result.stderr[-3000:]
    results = results_of(tmp_path / "eval")
    problems = {name: result["problems"] for name, result in results.items()}
    assert problems == {"aime24": 30, "aime25": 30, "math500": 500, "amc23_40": 40}
    assert list(results) == [*names, "amc23_40"]
    for name, rows in read(tmp_path / "eval").items():
        assert {row["finish_reason"] for row in rows} <= {"length", "stop"}
        assert len(rows) == problems[name.removesuffix(".jsonl")]
    assert results["math500"]["pass@1"] < 0.02 and results["math500"]["truncated_share"] > 0.9
    assert BENCHMARKS["math500"].num_samples == 1  # what is sampled by default
