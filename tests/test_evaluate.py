"""Scores and their error bars; the benchmarks; what an evaluation keeps, continues and refuses."""

import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data
import evaluate
from conftest import NO_CPU_VLLM, ROOT, SHARED, launch, needs_shared, needs_vllm
from data import ASK_FREE, ASK_LETTER, PROMPT, Example, InputError, load_tokenizer, write_rows
from demo.world import NUM_HELDOUT
from evaluate import BENCHMARKS, Args, load_benchmark, load_own, pass_at_k, with_options
from paper import label, tables
from run import write_args
from verify import is_correct

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


def test_the_intervals_of_5000_problems_take_little_memory():
    counts = np.random.default_rng(0).integers(17, size=5000)
    tracemalloc.start()
    evaluate.score_with_interval(counts, 16, 4)
    tables.paired_difference((counts, 16), (counts[::-1], 16), 4)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


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


# ---- the seven benchmarks


# Three rows for each, that we wrote, in the columns of the source.
AMC_ROWS = [
    {"problem": "1+1?", "answer": 2.0, "year": 2022, "url": "u", "solution": "s"},
    {"problem": "2+2?", "answer": "4", "year": "2023", "url": "u", "solution": "s"},
    {"problem": "3+3?", "answer": 6, "year": 2023, "url": "u", "solution": "s"},
]
AIME_ROWS = [
    {"id": 60 + n, "problem": f"{n}+{n}?", "solution": "s", "answer": f"{2 * n:03}", "url": "u"}
    for n in range(3)
]
GPQA_ROWS = [
    {
        **{"Question": f" Which one, {n}?\n", "Correct Answer": "right\n", "Record ID": "r"},
        **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)},
    }
    for n in range(3)
]
SOURCES = {
    "aime24": AIME_ROWS,
    "aime25": [{"problem": f"{n}?", "answer": "336^\\circ", "id": str(n)} for n in range(3)],
    "amc22": AMC_ROWS,
    "amc23": AMC_ROWS,
    "amc24": [{**row, "year": 2024} for row in AMC_ROWS],
    "math500": [
        {"problem": f"{n}?", "solution": "s", "answer": "E", "subject": "a", "level": 1}
        for n in range(3)
    ],
    "gpqa_diamond": GPQA_ROWS,
}
READ = {  # benchmark -> (question, answer) of each problem
    "aime24": [(f"{n}+{n}?", f"{2 * n:03}") for n in range(3)],
    "aime25": [(f"{n}?", "336^\\circ") for n in range(3)],
    "amc22": [("1+1?", "2")],
    "amc23": [("2+2?", "4"), ("3+3?", "6")],
    "amc24": [("1+1?", "2"), ("2+2?", "4"), ("3+3?", "6")],
    "math500": [(f"{n}?", "E") for n in range(3)],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_read_from_its_split_and_columns_on_the_hub(name, monkeypatch):
    calls = []

    def load_dataset(*place, split):
        calls.append((*place, split))
        return SOURCES[name]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(InputError, match=str(BENCHMARKS[name].num_problems)):
        load_benchmark(name)
    hub_id, config, split = calls[0]
    assert [hub_id, *[config] * bool(config)] == BENCHMARKS[name].hub_id.split(":")
    assert split == ("train" if name in ("aime24", "gpqa_diamond") else "test")

    of_year = {"amc22": 1, "amc23": 2}
    monkeypatch.setitem(
        BENCHMARKS, name, replace(BENCHMARKS[name], num_problems=of_year.get(name, 3))
    )
    problems = load_benchmark(name)
    assert [problem.id for problem in problems] == [f"{name}-{n}" for n in range(len(problems))]
    asked = ASK_LETTER if name == "gpqa_diamond" else ASK_FREE  # also for the answer E
    assert {evaluate.ask(problem) for problem in problems} == {asked}
    if name != "gpqa_diamond":
        assert [(problem.question, problem.answer) for problem in problems] == READ[name]
    for problem in problems if name == "gpqa_diamond" else []:
        first, *options = problem.question.splitlines()
        assert first.startswith("Which one") and options.pop(0) == ""
        assert [option[:4] for option in options] == ["(A) ", "(B) ", "(C) ", "(D) "]
        assert {option[4:] for option in options} == {"right", "wrong 1", "wrong 2", "wrong 3"}
        assert f"({problem.answer}) right" in options


def test_options_are_shuffled_the_same_everywhere_and_evenly():
    assert with_options("Q?", "r", ["a", "b", "c"]) == ("Q?\n\n(A) c\n(B) r\n(C) b\n(D) a", "B")
    assert with_options("Q?", "r", ["c", "b", "a"]) == with_options("Q?", "r", ["a", "b", "c"])
    made = [with_options(f"Q{n}?", "r", ["a", "b", "c"]) for n in range(2000)]
    letters = [letter for _, letter in made]
    assert all(letters.count(letter) == pytest.approx(500, abs=75) for letter in "ABCD")
    assert len({text.partition("\n\n")[2] for text, _ in made}) == 24  # all orders occur


def test_a_copy_of_a_benchmark_needs_the_right_number_of_problems(tmp_path):
    rows = [{"question": f"{n}?", "answer": "1"} for n in range(500)]
    write_rows(rows, tmp_path / "math500.jsonl")
    assert len(load_benchmark("math500", tmp_path)) == 500
    write_rows(rows[1:], tmp_path / "math500.jsonl")
    with pytest.raises(InputError, match="499"):
        load_benchmark("math500", tmp_path)


def test_your_own_problems_need_question_and_answer(tmp_path):
    path = tmp_path / "aime24.jsonl"
    write_rows([{"question": "1+1?", "answer": 2}, {"question": "x?", "answer": "B"}], path)
    first, second = load_own(path)
    assert (first.id, first.answer, evaluate.ask(first)) == ("row-0", "2", ASK_FREE)
    assert (second.id, second.answer, evaluate.ask(second)) == ("row-1", "B", ASK_LETTER)
    assert first.source == "own_aime24"  # it is not the paper's
    for rows, where in [
        ([{"question": "1+1?"}], "aime24.jsonl:1"),
        ([{"question": "", "answer": "1"}], "aime24.jsonl:1"),
        ([{"question": "1?", "answer": [1]}], "aime24.jsonl:1"),
        ([{"question": "1?", "answer": "1", "id": 3}] * 2, "aime24.jsonl:2"),
        ([], "aime24.jsonl"),
    ]:
        write_rows(rows, path)
        with pytest.raises(InputError, match=where):
            load_own(path)


def test_a_fingerprint_covers_the_whole_prompt_and_the_reference(monkeypatch):
    problem = Example("1", "1+1?", "", "2", "own")
    prints = {evaluate.fingerprint(replace(problem, **{n: "B"})) for n in ("question", "answer")}
    for name in ("SYSTEM_PROMPT", "ASK_FREE"):
        monkeypatch.setattr(data, name, "C")
        prints.add(evaluate.fingerprint(problem))
    monkeypatch.undo()
    assert evaluate.fingerprint(replace(problem, id="2")) == evaluate.fingerprint(problem)
    assert len(prints | {evaluate.fingerprint(problem)}) == 5


@needs_shared
def test_the_copies_of_real_benchmarks_are_read():
    for name, answer in {"aime24": "204", "aime25": "336^\\circ", "math500": "p - q"}.items():
        problems = load_benchmark(name, SHARED / "data")
        assert answer in {problem.answer for problem in problems}
    with pytest.raises(InputError):
        load_benchmark("amc23", SHARED / "data")  # it has 40 problems, the paper's has 46
    assert len(load_own(SHARED / "data" / "amc23.jsonl")) == 40


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


# An evaluation that writes answers down more often than 1,000 at a time.
OFTEN = "import run, evaluate as e; e.CHUNK = 100; run.run_script(e.evaluate, e.Args, e.__doc__)"


def start_and_wait_for_answers(folder: Path, tiny: Path, **values) -> subprocess.Popen:
    """An evaluation that has written some hundred answers."""
    command = [sys.executable, "-c", OFTEN, *settings(tiny, output_dir=folder, **values)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
    while sum(path.stat().st_size for path in folder.glob("samples.rank*")) < 50_000:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


def lines(folder: Path) -> set[str]:
    """All whole rows of an evaluation as they are written, with what a clock measured."""
    files = folder.glob("samples.rank*.jsonl")
    return {line for path in files for line in path.open() if line.endswith("\n")}


def read(folder: Path) -> dict[str, list[dict]]:
    """The samples of an evaluation, without what a clock measured."""
    samples = evaluate.read_samples(folder)
    return {name: [{**row, "seconds": None} for row in rows] for name, rows in samples.items()}


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
        rows = read(finished)[tier]
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
    part = folder / "samples.rank0.jsonl"
    part.write_text(part.read_text()[:-20])  # half a row, as a kill may leave one
    kept = lines(folder)
    assert 0 < len(kept) < 3 * NUM_HELDOUT * 8

    command = [sys.executable, "-m", "paper.tables", "score", folder]
    unfinished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert unfinished.returncode == 1 and "hard is not complete" in unfinished.stderr

    again = call(*settings(tiny, output_dir=folder))
    assert again.returncode == 0, again.stderr[-3000:]
    assert kept < lines(folder)  # they were not sampled again: their times are the same
    assert len(part.read_text().splitlines()) == 3 * NUM_HELDOUT * 8 + 1  # and the half row
    assert read(folder) == read(finished)
    assert results_of(folder) == results_of(finished)


def test_ctrl_c_keeps_what_was_answered_with_the_right_verdicts(finished, tiny, tmp_path):
    folder = tmp_path / "eval"
    process = start_and_wait_for_answers(folder, tiny, num_samples=32)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    expected = [row for rows in read(finished).values() for row in rows]
    kept = [row for rows in read(folder).values() for row in rows if row["sample"] < 8]
    assert kept and all(row in expected for row in kept)


def test_two_ranks_answer_every_problem_once_and_alike(finished, tiny, tmp_path):
    folder = tmp_path / "an evaluation"
    launch("evaluate.py", *settings(tiny, output_dir=folder), ranks=2)
    share = 3 * NUM_HELDOUT * 8 // 2
    for rank in range(2):
        assert len((folder / f"samples.rank{rank}.jsonl").read_text().splitlines()) == share
    assert read(folder) == read(finished)
    assert results_of(folder) == results_of(finished)
    # One answer is missing: one rank has nothing to do.
    kept = (folder / "samples.rank1.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.rank1.jsonl").write_text("".join(kept[1:]))
    launch("evaluate.py", *settings(tiny, output_dir=folder), ranks=2)
    assert read(folder) == read(finished)


def test_results_follow_from_the_samples_alone(finished, tmp_path, capsys):
    folder = tmp_path / "eval"
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    written = (folder / "samples.rank0.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.rank0.jsonl").write_text("".join(written[::-2]))
    (folder / "samples.rank7.jsonl").write_text("".join(written))  # half of them are duplicates
    tables.score(folder)
    assert list(results_of(finished)) == ["easy", "middle", "hard"]  # as they were asked for
    ours, theirs = (json.loads((f / "results.json").read_text()) for f in (folder, finished))
    assert ours == theirs
    assert capsys.readouterr().out.count("\n") == 6  # a blank line, head, three tiers, speed


def test_more_samples_are_added_to_those_that_are_there(finished, tiny, tmp_path):
    folder = tmp_path / "eval"
    shutil.copytree(finished, folder)
    hard = [tiny / "heldout" / "hard.jsonl"]
    result = call(*settings(tiny, output_dir=folder, benchmark_file=hard, num_samples=10))
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(lines(folder)) == len(lines(finished)) + 2 * NUM_HELDOUT
    assert lines(finished) < lines(folder)
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
    (models / "args.json").write_text('{"args": {}, "benchmarks": {}}')
    assert evaluate.default_folder("models/A") == Path("runs/A/eval")


# ---- tables


def write_evaluation(
    folder: Path, right: dict[str, list[int]], num_samples: int, **settings
) -> Path:
    """An evaluation of which only the counts of right answers matter."""
    rows = [
        {
            **{"benchmark": name, "id": f"{name}-{n}", "sample": k, "correct": k < count},
            **{"extracted": "1" if k < count else None, "answer": "1", "finish_reason": "stop"},
            **{"tokens": 10, "seconds": 0.5, "fingerprint": str(n), "text": "…"},
        }
        for name, counts in right.items()
        for n, count in enumerate(counts)
        for k in range(num_samples)
    ]
    write_rows(rows, folder / "samples.rank0.jsonl")
    asked = {n: {"problems": len(counts), "samples": num_samples} for n, counts in right.items()}
    args = {**dict.fromkeys(evaluate.PROTOCOL), **settings}
    (folder / "args.json").write_text(json.dumps({"args": args, "benchmarks": asked}))
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
    assert list(results_of(folder)) == names


def test_a_comparison_pairs_the_problems(tmp_path, capsys):
    first = write_evaluation(tmp_path / "sft" / "eval", {"own": [0, 4, 8, 8] * 10}, 8)
    second = write_evaluation(tmp_path / "oswft" / "eval", {"own": [1, 5, 8, 8] * 10}, 8)
    other = write_evaluation(tmp_path / "other" / "eval", {"own": [1, 5, 8]}, 8)
    tables.compare(first, second, k=(1,))
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| own | 1 | 62.5 | 68.8 | +6.2 [+4.") and row.endswith("| 0.0001 |")
    with pytest.raises(InputError, match="own has other problems or prompts than in"):
        tables.compare(first, other)
    with pytest.raises(InputError, match="8"):
        tables.compare(first, second, k=(9,))
    warm = {"own": [1, 5, 8, 8] * 10}
    other = write_evaluation(tmp_path / "warm" / "eval", warm, 8, temperature=1.0)
    tables.compare(first, other)
    (note,) = capsys.readouterr().err.splitlines()
    assert "differ in temperature" in note


def test_each_benchmark_gets_the_k_that_its_answers_allow():
    assert evaluate.choose_k((), {"aime24": 16, "math500": 1}) == {
        "aime24": (1, 16),
        "math500": (1,),
    }
    assert evaluate.choose_k((4, 8), {"aime24": 16, "math500": 1}) == {
        "aime24": (4, 8),
        "math500": (),
    }
    for k, most in (((2,), 1), ((0,), 1), ((), 0)):
        with pytest.raises(InputError):
            evaluate.choose_k(k, {"math500": most})


def test_a_damaged_row_does_not_count(tmp_path):
    folder = write_evaluation(tmp_path / "eval", {"own": [1, 2], "more": [1, 1]}, 2)
    path = folder / "samples.rank0.jsonl"
    good = path.read_text().splitlines(keepends=True)
    for damage in ("{half\n", "7\n", "\n", '{"benchmark": "own"}\n'):
        path.write_text("".join([good[0], damage, *good[2:]]))
        assert evaluate.read_samples(folder)["own"] == [json.loads(good[n]) for n in (0, 2, 3)]
        with pytest.raises(InputError, match="own is not complete"):
            tables.score(folder)
        assert list(results_of(folder)) == ["more"]
        path.write_text("".join([good[0], damage, *good[2:4]]))
        with pytest.raises(InputError, match="own is not complete"):
            tables.score(folder)
        assert not (folder / "results.json").exists()  # of what was complete before
        with pytest.raises(InputError, match="own is not complete"):
            tables.compare(folder, folder)


def test_a_row_is_never_appended_to_half_a_row(tmp_path):
    path = tmp_path / "samples.rank0.jsonl"
    for before, after in (("", ""), ("{}\n", "{}\n"), ('{"ha', '{"ha\n'), ("é", "é\n")):
        path.write_text(before)
        evaluate.append([{"text": "é\n"}], path)
        assert path.read_text() == after + '{"text": "é\\n"}\n'


# ---- what is refused


def missing_of(args: Args) -> list:
    return evaluate.find_missing(args, args.output_dir, load_tokenizer(args.model))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": 0}, "k of pass@k"),
        ({"benchmarks": ("aime26",)}, "aime26"),
        ({"benchmarks": ("aime24",), "data_dir": Path("tests")}, "tests/aime24.jsonl: no such"),
        ({"benchmark_file": ("absent.jsonl",)}, "absent.jsonl: no such file"),
        ({"benchmark_file": ("hard", "hard")}, "hard"),
        ({"benchmark_file": ("special",)}, r"special.jsonl:1 .*<\|im_end\|>"),
        ({"k": (9,)}, "8"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(values, message, tiny, tmp_path):
    files = {"hard": tiny / "heldout" / "hard.jsonl", "special": tmp_path / "special.jsonl"}
    write_rows([{"question": "<|im_end|>", "answer": 4}], files["special"])
    values = {"benchmark_file": ("hard",), "num_samples": 8, **values}
    values["benchmark_file"] = tuple(Path(files.get(f, f)) for f in values["benchmark_file"])
    with pytest.raises(InputError, match=message):
        missing_of(Args(model=str(tiny / "model"), **values, output_dir=tmp_path / "eval"))
    assert not (tmp_path / "eval").exists()


def test_a_benchmark_that_cannot_be_reached_says_what_to_do(tiny):
    result = call(*settings(tiny, benchmark_file=[]), "--benchmarks", "math500", HF_HUB_OFFLINE="1")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    said = result.stderr.splitlines()[-1]
    assert said.startswith("error: math500: ") and "math500.jsonl with --data_dir" in said


def test_answers_of_another_model_protocol_or_problem_are_not_mixed(finished, tiny, tmp_path):
    folder, model = tmp_path / "eval", tmp_path / "model"
    shutil.copytree(finished, folder)
    shutil.copytree(tiny / "model", model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # trained on
    (model / "model.safetensors").write_bytes(weights)
    easy, hard = (tiny / "heldout" / f"{tier}.jsonl" for tier in ("easy", "hard"))
    rows = [json.loads(line) for line in hard.open()]
    changed, gone = tmp_path / "changed" / "hard.jsonl", tmp_path / "gone" / "hard.jsonl"
    write_rows([{**rows[0], "question": "1+1"}, *rows[1:]], changed)
    write_rows(rows[1:], gone)
    training = tmp_path / "run"
    training.mkdir()
    (training / "args.json").write_text('{"args": {}}')
    args = {
        **{"model": str(tiny / "model"), "output_dir": folder, "num_samples": 9},
        **{"max_completion_length": 48, "precision": "fp32", "temperature": 1.0},
        **{"top_p": 1.0, "top_k": 0, "benchmark_file": (easy, hard)},
    }
    for values, message in [
        ({"seed": 1}, "seed"),
        ({"model": str(model)}, "model_version"),
        ({"benchmark_file": (easy, changed)}, "problems of hard"),
        ({"benchmark_file": (easy, gone)}, "problems of hard"),
        ({"output_dir": training}, "training run"),
    ]:
        with pytest.raises(InputError, match=message):
            missing_of(Args(**{**args, **values}))
    assert lines(folder) == lines(finished) and results_of(folder) == results_of(finished)
    assert (folder / "args.json").read_text() == (finished / "args.json").read_text()
    # From its args.json on: another evaluation may be loading its model.
    empty = {**args, "output_dir": tmp_path / "empty"}
    assert len(missing_of(Args(**empty))) == 2 * NUM_HELDOUT * 9
    with pytest.raises(InputError, match="seed"):
        missing_of(Args(**empty, seed=1))
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            missing_of(Args(**args))


REWARD = """
def short(completion, example):
    return float(len(completion) < example.limit)
"""


def test_a_model_is_judged_by_the_reward_that_it_was_trained_with(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "run" / "final")
    (tmp_path / "own.py").write_text(REWARD)
    write_args(tmp_path / "run", args={"reward": f"{tmp_path}/own.py:short"})
    problems = [json.loads(line) for line in (tiny / "heldout" / "easy.jsonl").open()][:8]
    write_rows([{**row, "limit": 30} for row in problems], tmp_path / "own.jsonl")
    setting = settings(tiny, benchmark_file=[tmp_path / "own.jsonl"])
    setting += ["--model", tmp_path / "run" / "final", "--num_samples", "2"]
    for reward, judge in ((), lambda row: len(row["text"]) < 30), (("--reward", "verifier"), None):
        folder = tmp_path / f"eval{len(reward)}"
        result = call(*setting, "--output_dir", folder, *reward)
        assert result.returncode == 0, result.stderr
        rows = [json.loads(line) for line in (folder / "samples.rank0.jsonl").open()]
        assert len(rows) == 16
        for row in rows:
            right = judge(row) if judge else is_correct(row["text"], row["answer"])
            assert row["correct"] == right


def test_a_model_that_was_trained_with_other_prompts_gets_a_note(tiny, tmp_path, capsys):
    shutil.copytree(tiny / "model", tmp_path / "run" / "final")
    args = Args(
        model=str(tmp_path / "run" / "final"),
        benchmark_file=(tiny / "heldout" / "hard.jsonl",),
        output_dir=tmp_path / "eval",
    )
    for prompt, notes in ((PROMPT, 0), ({**PROMPT, "system": "Be brief."}, 1)):
        (tmp_path / "run" / "args.json").write_text(json.dumps({"args": {}, "prompt": prompt}))
        missing_of(args)
        assert capsys.readouterr().err.count("other prompts") == notes
    assert json.loads((tmp_path / "eval" / "args.json").read_text())["prompt"] == PROMPT


def test_the_version_of_a_model_on_the_hub_is_its_commit(tiny, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(tiny / "model", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    code = "import data, evaluate; data.load_tokenizer(m := 'someone/tiny'); "
    code += "print(evaluate.model_version(m))"
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.stdout.strip() == commit, result.stderr


# ---- real problems


@needs_shared
@needs_vllm
def test_real_problems_with_the_real_vocabulary(tmp_path):
    init = [sys.executable, "-m", "demo.tiny", "init", "--max_length", "4096"]
    init += ["--tokenizer", SHARED / "qwen3_tokenizer", "--output_dir", tmp_path / "model"]
    subprocess.run([*map(str, init)], cwd=ROOT, check=True)
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
    assert problems == {"aime24": 30, "aime25": 30, "math500": 500, "own_amc23": 40}
    assert list(results) == [*names, "own_amc23"]
    for name, rows in read(tmp_path / "eval").items():
        assert {row["finish_reason"] for row in rows} <= {"length", "stop"}
        assert len(rows) == problems[name]
    assert results["math500"]["pass@1"] < 0.02 and results["math500"]["truncated_share"] > 0.9
    assert BENCHMARKS["math500"].num_samples == 1  # what is sampled by default
