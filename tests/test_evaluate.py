"""Scores and their error bars; the benchmarks; what an evaluation keeps, continues and refuses."""

import itertools
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import evaluate
import models
from conftest import SHARED, edit_json, launch, needs_shared, needs_vllm, run_alone, slow, start
from data import Example, InputError, write_rows
from demo.tiny import make_tokenizer
from demo.world import NUM_HELDOUT
from evaluate import BENCHMARKS, Args, load_benchmark, load_problems, pass_at_k, with_options
from families import FAMILIES, make_model
from look import tables
from models import ASK_FREE, ASK_LETTER, load_tokenizer
from rollout import Completion
from run import read_args, write_args

import numpy as np
import pytest


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_equals_the_mean_over_all_subsets(n, c):
    answers = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    for k in (0, n + 1):
        with pytest.raises(ValueError):
            pass_at_k(n, c, k)


def random_problems(rng: np.random.Generator, mean: float, shape: float, size: int) -> np.ndarray:
    """Chances of a right answer to each problem: the smaller the shape, the more unequal."""
    a, b = shape * mean / (1 - mean), shape * (1 - mean) / mean
    return rng.beta(max(a, shape), max(b, shape), size)  # Beta's smaller parameter is the shape


DRAWS = 300  # of problems and answers, for each kind of benchmark
# Of intervals that hold the truth, the least and the largest share that docs/evaluation.md states
STATED, STATED_AT_AN_EDGE = (0.91, 0.97), (0.84, 0.98)
CHANCE = 0.03  # by which such a share of 300 may be off: two standard deviations
KINDS = [*itertools.product((0.02, 0.05, 0.08, 0.2, 0.5, 0.8, 0.95), (1, 4, 16))]  # mean pass@1, k


@pytest.mark.parametrize("shape", [0.03, 0.1, 0.3, 1])
@pytest.mark.parametrize(("problems", "n"), [(30, 16), (500, 1), (198, 1)])
def test_intervals_hold_the_true_score_as_often_as_the_page_says(problems, n, shape):
    rng = np.random.default_rng(0)
    for mean, k in (kind for kind in KINDS if kind[1] <= n):
        truth = np.mean(1 - (1 - random_problems(rng, mean, shape, 100_000)) ** k)
        hits = 0
        for _ in range(DRAWS):
            counts = rng.binomial(n, random_problems(rng, mean, shape, problems))
            score, (low, high) = evaluate.score_with_interval(counts, n, k)
            assert 0 <= low <= score <= high <= 1
            hits += low <= truth <= high
        at_an_edge = problems == 30 and not 0.1 < truth < 0.85
        least, most = STATED_AT_AN_EDGE if at_an_edge else STATED
        if 0.02 <= truth <= 0.95:
            assert least - CHANCE <= hits / DRAWS <= most + CHANCE, (mean, k, truth)


def test_95_of_100_intervals_of_a_difference_hold_the_true_one_up_to_chance(monkeypatch):
    monkeypatch.setattr(tables, "SWAPS", 100)
    rng = np.random.default_rng(0)
    for mean, k in ((0.05, 1), (0.3, 1), (0.3, 16)):
        hits = 0
        for _ in range(DRAWS):
            chances = random_problems(rng, mean, 0.3, 30)
            one, other = ((rng.binomial(16, chances), 16) for _ in range(2))  # of one model
            _, (low, high), _ = tables.paired_difference(one, other, k)
            hits += low <= 0 <= high
        assert hits / DRAWS == pytest.approx(0.95, abs=CHANCE), (mean, k)


def test_an_interval_is_wilson_s_of_as_many_answers_as_the_variance_says():
    for counts, n, k, bounds in (
        (np.zeros(30, int), 16, 1, (0, 0.1135)),
        (np.full(30, 16), 16, 16, (0.8865, 1)),
        (np.full(30, 4), 10, 1, (0.2459, 0.5768)),  # rounding gives these a variance
        (np.arange(30) % 2, 1, 1, (0.3315, 0.6685)),  # 15 of 30
        (np.array([0, 16] * 15), 16, 1, (0.3315, 0.6685)),  # 15 of 30, too
        (np.array([4, 12] * 15), 16, 1, (0.4119, 0.5881)),  # 60 of 120
    ):
        assert evaluate.score_with_interval(counts, n, k)[1] == pytest.approx(bounds, abs=1e-4)


def test_a_difference_is_tested_by_swapping_the_two_in_each_problem():
    wins, losses = (np.ones(5, dtype=int), 1), (np.zeros(5, dtype=int), 1)
    difference, interval, p_value = tables.paired_difference(losses, wins, 1)
    assert difference == 1 and interval == (1, 1)
    assert p_value == pytest.approx(2 / 2**5, abs=0.01)  # two of the 32 ways to swap
    assert tables.paired_difference(wins, wins, 1) == (0, (0, 0), 1)
    assert tables.paired_difference(losses, (np.array([0, 1, 1, 2, 4]), 4), 1)[1] == pytest.approx(
        (0.4 - 2.776 * 0.1696, 0.4 + 2.776 * 0.1696),
        abs=1e-3,  # Student's, four degrees of freedom
    )


WRONG = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
HUB = {  # (data set, its config, split): rows that we wrote, in the columns of the source
    ("HuggingFaceH4/aime_2024", None, "train"): [{"id": 60, "problem": "1+1?", "answer": "002"}],
    ("math-ai/aime25", None, "test"): [{"id": "0", "problem": "1?", "answer": "336^\\circ"}],
    ("scottgeng00/amc_22-24", None, "test"): [
        {"problem": f"{year}?", "answer": 2.0, "year": year} for year in (2022, "2023", 2023, 2024)
    ],
    ("HuggingFaceH4/MATH-500", None, "test"): [{"problem": "1?", "answer": "E", "level": 1}],
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): [
        {"Question": " Which?\n", "Correct Answer": "right\n", "Record ID": "r", **WRONG}
    ],
}
READ = {  # benchmark: (question, answer) of each problem
    "aime24": [("1+1?", "002")],
    "aime25": [("1?", "336^\\circ")],
    "amc22": [("2022?", "2")],
    "amc23": [("2023?", "2")] * 2,
    "amc24": [("2024?", "2")],
    "math500": [("1?", "E")],
    "gpqa_diamond": [with_options("Which?", "right", [*WRONG.values()])],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_read_from_its_split_and_columns_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *place, split: HUB[*place, split])
    with pytest.raises(InputError, match=str(BENCHMARKS[name].num_problems)):
        load_benchmark(name)
    benchmark = replace(BENCHMARKS[name], num_problems=len(READ[name]))
    monkeypatch.setitem(BENCHMARKS, name, benchmark)
    problems = load_benchmark(name)
    assert [(problem.question, problem.answer) for problem in problems] == READ[name]
    asked = ASK_LETTER if name == "gpqa_diamond" else ASK_FREE  # also for the answer E
    assert {evaluate.ask(problem) for problem in problems} == {asked}


def test_options_are_shuffled_the_same_everywhere_and_evenly():
    assert with_options("Q?", "r", ["a", "b", "c"]) == ("Q?\n\n(A) c\n(B) r\n(C) b\n(D) a", "B")
    assert with_options("Q?", "r", ["c", "b", "a"]) == with_options("Q?", "r", ["a", "b", "c"])
    made = [with_options(f"Q{n}?", "r", ["a", "b", "c"]) for n in range(2000)]
    letters = [letter for _, letter in made]
    assert all(letters.count(letter) == pytest.approx(500, abs=75) for letter in "ABCD")
    assert len({text.partition("\n\n")[2] for text, _ in made}) == 24  # all orders occur


def test_your_own_problems_need_question_and_answer(tmp_path):
    path = tmp_path / "mine.jsonl"
    load_own = lambda path: load_problems(Args(model="", benchmark_file=(path,)))[path.stem]  # noqa: E731
    write_rows([{"question": "1+1?", "answer": 2}, {"question": "x?", "answer": "B"}], path)
    first, second = load_own(path)
    assert (first.id, first.answer, evaluate.ask(first)) == ("row-0", "2", ASK_FREE)
    assert (second.id, second.answer, evaluate.ask(second)) == ("row-1", "B", ASK_LETTER)
    with pytest.raises(InputError, match="has this name"):  # it would not be the paper's
        load_own(path.with_name("aime24.jsonl"))
    row = {"question": "1?", "answer": "1", "id": 3}
    for rows in ([{"question": "1?"}], [{**row, "question": ""}], [row, row], []):
        write_rows(rows, path)
        with pytest.raises(InputError, match=r"mine\.jsonl"):
            load_own(path)


def test_a_fingerprint_covers_all_prompts_and_references(monkeypatch):
    problem = Example("1", "1+1?", "", "2", "own")
    print_of = lambda **changes: evaluate.fingerprint([problem, replace(problem, **changes)])  # noqa: E731
    prints = {print_of(**{name: "B"}) for name in ("question", "answer", "id")}
    for name in ("SYSTEM_PROMPT", "ASK_FREE"):
        monkeypatch.setattr(models, name, "C")
        prints.add(print_of())
    monkeypatch.undo()
    assert len(prints | {print_of()}) == 6 and print_of() == print_of(solution="B")


TIERS = ("easy", "middle", "hard")
NUM_ANSWERS = 3 * NUM_HELDOUT * 8
SAMPLING = {"num_samples": 8, "max_completion_length": 48, "precision": "fp32"}
SAMPLING |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "verifier_workers": 1}


def settings(tiny: Path, folder: Path) -> list:
    """Sampling of the held-out tiers in seconds: 144 problems, 8 answers to each."""
    words = [word for name, value in SAMPLING.items() for word in (f"--{name}", value)]
    problems = [tiny / "heldout" / f"{tier}.jsonl" for tier in TIERS]
    call = ["--model", tiny / "model", "--output_dir", folder, *words]
    return [*call, "--benchmark_file", *problems]


def results_of(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    """An evaluation of the tiny model that was not disturbed."""
    folder = tmp_path_factory.mktemp("finished") / "eval"
    launch("evaluate.py", *settings(tiny, folder))
    assert read_args(folder)["vllm_runner"] == "V1"
    return folder


@slow
def test_a_stopped_evaluation_goes_on_over_two_ranks_where_it_was(finished, tiny, tmp_path):
    folder = tmp_path / "an evaluation"
    process = start("evaluate.py", *settings(tiny, folder), start_new_session=True)
    while not any(path.stat().st_size > 50_000 for path in folder.glob("samples.*")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output
    [path] = folder.glob("samples.*")
    kept = path.read_bytes()
    assert kept.endswith(b"\n")
    path.write_bytes(kept + b'{"benchmark": "ea')  # as a kill may leave it
    assert sum(map(len, evaluate.read_samples(folder).values())) == kept.count(b"\n")
    launch("evaluate.py", *settings(tiny, folder), ranks=2)
    assert path.read_bytes().startswith(kept)  # not sampled again
    written = [len(path.read_text().splitlines()) for path in folder.glob("samples.*")]
    assert sum(written) == NUM_ANSWERS and len(written) == 2
    # Other answers are batched together: rounding may choose another token, but it hardly does.
    for name, rows in evaluate.read_samples(finished).items():
        same = [a == b for a, b in zip(evaluate.read_samples(folder)[name], rows, strict=True)]
        assert sum(same) >= 0.98 * len(same), (name, sum(same))


@slow
def test_results_follow_from_the_samples_alone(finished, tmp_path):
    copied = shutil.copytree(finished, tmp_path / "eval")
    (copied / "results.json").unlink()
    written = (copied / "samples.rank0.jsonl").read_text().splitlines(keepends=True)
    (copied / "samples.rank0.jsonl").write_text("".join(written[::-2]))
    (copied / "samples.rank7.jsonl").write_text("".join(written))  # half of them are duplicates
    evaluate.score_and_print(copied)
    assert results_of(copied) == results_of(finished)


def find_missing(tiny: Path, folder: Path, **changes) -> list[tuple[Example, int]]:
    """What evaluate.py would sample into a folder for the hard tier."""
    values = {"model": str(tiny / "model"), "output_dir": folder, **SAMPLING}
    values["benchmark_file"] = (tiny / "heldout" / "hard.jsonl",)
    args = Args(**{**values, **changes})
    problems = evaluate.load_problems(args)
    return evaluate.find_missing(args, args.output_dir, load_tokenizer(args.model), problems)


@pytest.mark.parametrize(("temperature", "count"), [(0.6, 16), (0.0, 1)])
def test_greedy_answers_are_alike_so_the_default_is_one(temperature, count, tiny, tmp_path):
    missing = find_missing(tiny, tmp_path, num_samples=None, temperature=temperature)
    assert len(missing) == 48 * count


def test_each_model_is_evaluated_into_a_folder_of_its_own(tmp_path, monkeypatch):
    run, model = tmp_path / "runs" / "oswft", tmp_path / "models" / "A"
    write_args(run, args={})
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, folder in [
        ("runs/oswft/final", run / "eval"),
        ("runs/oswft/checkpoint-000050/", run / "eval-checkpoint-000050"),
        (str(model), Path("runs/A/eval")),
        ("Qwen/Qwen3-4B", Path("runs/Qwen3-4B/eval")),
    ]:
        assert evaluate.default_folder(name) == folder


def write_evaluation(folder: Path, num_samples: int, temperature=0.6, **right: list[int]) -> Path:
    """An evaluation of which only the counts of right answers matter."""
    rows, asked = [], {}
    fields = {"text": "", "answer": "1", "finish_reason": "stop", "tokens": 10}
    fields["judge"] = evaluate.judge_version(None)
    for name, counts in right.items():
        size = len(counts)
        asked[name] = {"problems": size, "samples": num_samples, "fingerprint": str(size)}
        for n, k in itertools.product(range(size), range(num_samples)):
            answer = {"id": f"{name}-{n}", "sample": k, "correct": k < counts[n]}
            rows.append({"benchmark": name, **answer, **fields})
    write_rows(rows, folder / "samples.rank0.jsonl")
    args = {**dict.fromkeys(evaluate.PROTOCOL), "temperature": temperature}
    write_args(folder, args=args, benchmarks=asked)
    return folder


def test_the_table_has_a_row_for_each_run_and_the_papers_columns(tmp_path, capsys):
    aime = [16] * 3 + [1] * 3 + [0] * 24
    first = write_evaluation(tmp_path / "sft" / "eval", 16, **{"a b.v1": [8] * 4}, aime24=aime)
    second = write_evaluation(tmp_path / "oswft" / "eval", 16, aime24=aime[::-1])
    tables.table((first, second))
    head, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert head[1:] == ["AIME 24, Pass@1 / @16", "a b.v1, Pass@1 / @16 |"]
    assert [row[0] for row in rows] == ["| sft", "| oswft"]
    assert rows[0][1].startswith("10.6 [") and " / 20.0 [" in rows[0][1]
    assert rows[0][2] == "50.0 [15.0, 85.0] / 100.0 [51.0, 100.0] |" and rows[1][2] == "– |"


def test_a_comparison_pairs_the_problems(tmp_path, capsys):
    first = write_evaluation(tmp_path / "sft" / "eval", 8, own=[0, 4, 8, 8] * 10)
    second = write_evaluation(tmp_path / "oswft" / "eval", 8, 1.0, own=[1, 5, 8, 8] * 10)
    tables.compare(first, second)
    said = capsys.readouterr()
    *_, row, last = said.out.splitlines()
    assert last.startswith("| own | 8 | 75.0 | 100.0 |")
    assert row.startswith("| own | 1 | 62.5 | 68.8 | +6.2 [+4.") and row.endswith("| 0.0001 |")
    assert "temperature" in said.err  # the two differ in it
    other = write_evaluation(tmp_path / "other" / "eval", 8, own=[1, 5, 8])
    for refused in (tables.compare, lambda *both: tables.table(both)):
        with pytest.raises(InputError):
            refused(first, other)


def test_answers_without_a_box_or_letter_ungraded_and_right_ones_cut_off_are_counted():
    answers = [
        ("we try 12, then 13 and", "13", True, "length"),
        ("we try 12, then 14 and", "13", False, "length"),
        (r"\boxed{13}", "13", True, "stop"),
        (r"\boxed{12}", "B", False, "stop"),  # no letter
        ("The answer is B.", "B", True, "stop"),
    ]
    names = ("text", "answer", "correct", "finish_reason")
    rows = [{"id": row[0], **dict(zip(names, row, strict=True))} for row in answers]
    for n, row in enumerate(rows):
        row["tokens"] = 10 * n
    rows[3]["ungraded"] = True  # rows of earlier versions do not say it
    results = evaluate.summarize(rows)
    shares = ("truncated_share", "truncated_right_share", "without_box_share", "ungraded_share")
    assert [results[name] for name in shares] == [2 / 5, 1 / 5, 3 / 5, 1 / 5]
    assert results["completion_length_mean"] == 20


def test_an_incomplete_benchmark_is_left_out_and_said(tmp_path, capsys):
    folder = write_evaluation(tmp_path / "eval", 2, own=[1, 2], more=[1, 1])
    path = folder / "samples.rank0.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[1:]))
    evaluate.score_and_print(folder)
    assert list(results_of(folder)) == ["more"]
    assert "own has 3 of 4 answers" in capsys.readouterr().err
    path.write_text("".join(rows[1:-1]))
    for refused in (evaluate.score_and_print, lambda folder: tables.compare(folder, folder)):
        with pytest.raises(InputError):
            refused(folder)


BAD = [
    ("benchmarks", ("aime26",)),
    ("max_completion_length", 8192),  # more than the model reads
    ("vllm_memory", 80.0),  # is a share
    ("num_samples", -1),
    ("benchmark_file", (Path("own.jsonl"), Path("own.jsonl"))),
    ("benchmark_file", (Path("special.jsonl"),)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_input_is_refused_before_anything_is_written(name, value, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows([{"question": "<|im_end|>", "answer": 4}], Path("special.jsonl"))
    write_rows([{"question": "2+2", "answer": 4}], Path("own.jsonl"))
    with pytest.raises(InputError):
        find_missing(tiny, tmp_path / "eval", **{name: value})
    assert not (tmp_path / "eval").exists()


@slow
def test_answers_of_other_settings_are_not_mixed(finished, tiny, tmp_path, monkeypatch):
    copied = shutil.copytree(finished, tmp_path / "eval")
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    with (model / "model.safetensors").open("ab") as weights:
        weights.write(b"0")  # trained on
    rows = [json.loads(line) for line in (tiny / "heldout" / "hard.jsonl").open()]
    changed = tmp_path / "changed" / "hard.jsonl"
    write_rows([{**rows[0], "question": "1+1"}, *rows[1:]], changed)
    write_args(tmp_path / "run", args={})
    values = {"seed": 1, "model": str(model), "output_dir": tmp_path / "run"}
    values["benchmark_file"] = (changed,)
    for name, value in values.items():
        with pytest.raises(InputError, match="choose another folder"):
            find_missing(tiny, copied, **{name: value})
    monkeypatch.setattr(models, "PROMPT", {})
    with pytest.raises(InputError, match="another prompt"):
        find_missing(tiny, copied)
    for read in (evaluate.read_samples, read_args):
        assert read(copied) == read(finished)


def test_a_prompt_that_is_not_the_runs_is_told(tiny, model_copy, tmp_path, capsys):
    for prompt, told in ((models.PROMPT, 0), ({**models.PROMPT, "free answer": "?"}, 1)):
        write_args(model_copy.parent, prompt=prompt)
        find_missing(tiny, tmp_path / "eval", model=str(model_copy), temperature=0.0)
        assert capsys.readouterr().err.count("was trained with another prompt") == told


def test_a_judge_is_known_by_its_code_and_its_version(tmp_path, monkeypatch):
    versions = {evaluate.judge_version(None)}
    (tmp_path / "own.py").write_text("1")
    for name in ("f", "g"):
        versions.add(evaluate.judge_version(f"{tmp_path}/own.py:{name}"))
    evaluate.judge_version.cache_clear()
    (tmp_path / "own.py").write_text("2")
    versions.add(evaluate.judge_version(f"{tmp_path}/own.py:f"))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0")
    versions.add(evaluate.judge_version(None))
    monkeypatch.setattr("evaluate.verify.__file__", f"{tmp_path}/own.py")
    evaluate.judge_version.cache_clear()
    versions.add(evaluate.judge_version(None))
    evaluate.judge_version.cache_clear()
    assert len(versions) == 6
    (tmp_path / "moved.py").write_text("2")
    assert evaluate.judge_version(f"{tmp_path}/moved.py:f") in versions


def test_answers_that_another_judge_has_graded_are_graded_anew(tiny, tmp_path, capsys):
    problems = [{"question": "?", "answer": "7"}, {"question": "??", "answer": "8"}]
    write_rows(problems, own := tmp_path / "own.jsonl")
    find = lambda: find_missing(tiny, tmp_path / "eval", benchmark_file=(own,), num_samples=1)  # noqa: E731
    assert len(find()) == 2
    (problem, _), *_ = find()
    fields = {"benchmark": "own", "sample": 0, "text": r"\boxed{7}", "answer": "7", "tokens": 1}
    fields |= {"finish_reason": "stop", "correct": False, "extracted": "8"}  # an earlier version
    write_rows([{**fields, "id": problem.id}], tmp_path / "eval" / "samples.rank3.jsonl")
    write_rows([{**fields, "benchmark": "x", "id": "1"}], tmp_path / "eval" / "samples.rank4.jsonl")
    for told in (1, 0):
        assert [(p.id, n) for p, n in find()] == [("row-1", 0)]
        [row] = evaluate.read_samples(tmp_path / "eval")["own"]
        assert (row["correct"], row["extracted"], row["ungraded"]) == (True, "7", False)
        assert capsys.readouterr().err.count("1 answers are graded anew") == told
    assert not evaluate.read_samples(tmp_path / "eval")["x"][0]["correct"]  # it was not asked for


def test_verdicts_of_two_judges_are_neither_compared_nor_summed_up(tmp_path, capsys):
    first, second = (
        write_evaluation(tmp_path / name / "eval", 2, own=[1, 2], more=[1, 1]) for name in "ab"
    )
    path = second / "samples.rank0.jsonl"
    now = evaluate.judge_version(None)
    path.write_text(path.read_text().replace(now, "another", 4))  # those of the first benchmark
    for folders in ((first, second), (second, first)):
        with pytest.raises(InputError, match="own has verdicts of two judges"):
            tables.compare(*folders)
    evaluate.score_and_print(second)
    assert list(results_of(second)) == ["more"]
    assert "own has verdicts of another judge" in capsys.readouterr().err
    path.write_text(path.read_text().replace("another", now, 1))
    with pytest.raises(InputError, match="own has verdicts of two judges"):
        tables.table((second,))


SHORT = """
def short(completion, example):
    if not completion:
        raise MemoryError
    return len(completion) < int(example.source)
"""


def test_a_reward_of_ones_own_judges_the_answers(tiny, tmp_path, monkeypatch, one_rank):
    (tmp_path / "own.py").write_text(SHORT)
    write_rows([{"question": "?", "answer": "1", "source": "3"}], tmp_path / "own.jsonl")

    def stream(prompts, *_, **__):
        yield [Completion(n, [1], "x" * n, "stop", []) for n in range(len(prompts))]

    stub = SimpleNamespace(model_runner=None, stream=stream)
    monkeypatch.setattr(evaluate, "refuse_gap", lambda *_: None)
    monkeypatch.setattr(evaluate, "Rollout", lambda *args, **kwargs: stub)
    monkeypatch.setattr(evaluate, "init_ranks", lambda *args, **kwargs: None)
    own = {"benchmark_file": (tmp_path / "own.jsonl",), "reward": f"{tmp_path}/own.py:short"}
    paths = {"model": str(tiny / "model"), "output_dir": tmp_path / "eval"}
    evaluate.evaluate(Args(**paths, **own, max_completion_length=48))
    results = results_of(tmp_path / "eval")["own"]
    assert (results["pass@1"], results["ungraded_share"]) == (2 / 16, 1 / 16)


def test_a_model_that_training_refuses_is_not_scored(model_copy, tmp_path, one_rank):
    edit_json(model_copy / "config.json", attention_bias=True)
    args = Args(model=str(model_copy), max_completion_length=48)
    problem = Example("1", "1+1=", "", "2", "own")
    with pytest.raises(InputError, match="weights are missing"):
        evaluate.answer_missing(args, tmp_path, load_tokenizer(args.model), [(problem, 0)])
    assert not [*tmp_path.glob("samples*")]


@slow
@needs_vllm
def test_a_family_that_vllm_computes_otherwise_is_not_scored(tiny, tmp_path):
    make_model(*FAMILIES["GPT-NeoX, Pythia"]).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    done = run_alone("evaluate.py", *settings(tiny, tmp_path / "eval"), "--model", tmp_path)
    assert done.returncode == 1 and "nats a token off" in done.stderr, done.stderr


@needs_shared
def test_real_problems_are_read_and_a_set_of_another_size_is_refused(tiny, tmp_path):
    names, folder = ("aime24", "aime25", "math500"), SHARED / "data"
    args = Args(model=str(tiny / "model"), benchmarks=names, data_dir=folder)
    args.benchmark_file = (shutil.copy(folder / "amc23.jsonl", tmp_path / "my_amc.jsonl"),)
    problems = evaluate.load_problems(args)
    counts = {name: len(part) for name, part in problems.items()}
    assert counts == {"aime24": 30, "aime25": 30, "math500": 500, "my_amc": 40}
    answers = {problem.answer for part in problems.values() for problem in part}
    assert {"204", "336^\\circ", "p - q"} <= answers
    with pytest.raises(InputError):
        load_benchmark("amc23", folder)  # it has 40 problems, the paper's has 46
