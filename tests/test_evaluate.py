"""Scores and their error bars; the benchmarks; what an evaluation keeps, continues and refuses."""

import itertools
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import evaluate
import models
from conftest import REWARD, TINY_LENGTHS, edit_json, ended, launch, slow, start
from data import Example, InputError, derive_seed, read_rows, write_json, write_rows
from evaluate import BENCHMARKS, Args, load_benchmark, load_problems, pass_at_k, with_options
from look import tables
from models import ASK_FREE, ASK_LETTER
from rollout import kv_cache_bytes
from run import read_args, write_args
from stand_in import DIGITS, END, TOKENIZER, Scripted, StandIn, digits

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


def test_an_interval_is_wilson_s_of_as_many_answers_as_the_variance_says():
    for counts, n, k, bounds in (
        (np.zeros(30, int), 16, 1, (0, 0.1135)),
        (np.full(30, 4), 10, 1, (0.2459, 0.5768)),  # rounding gives these a variance
        (np.array([0, 16] * 15), 16, 1, (0.3315, 0.6685)),  # 15 of 30
        (np.array([4, 12] * 15), 16, 1, (0.4119, 0.5881)),  # 60 of 120
        (np.array([7, 9] * 15), 16, 1, (0.4554, 0.5446)),  # 240 of 480, and no more
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
READ = {  # benchmark: answers to each problem; (question, answer) of HUB's rows
    "aime24": (16, [("1+1?", "002")]),
    "aime25": (16, [("1?", "336^\\circ")]),
    "amc22": (16, [("2022?", "2")]),
    "amc23": (16, [("2023?", "2")] * 2),
    "amc24": (16, [("2024?", "2")]),
    "math500": (1, [("1?", "E")]),
    "gpqa_diamond": (1, [with_options("Which?", "right", [*WRONG.values()])]),
}


def test_a_benchmark_is_read_from_its_split_and_columns_on_the_hub(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *place, split: HUB[*place, split])
    for name, benchmark in BENCHMARKS.items():
        with pytest.raises(InputError, match=f"{name} has {benchmark.num_problems}"):
            load_benchmark(name)  # HUB has less
        num_samples, rows = READ[name]
        assert benchmark.num_samples == num_samples
        monkeypatch.setitem(BENCHMARKS, name, replace(benchmark, num_problems=len(rows)))
    problems, found = load_problems(Args(model="")), {}
    for problem in problems:
        found.setdefault(problem.source, []).append((problem.question, problem.answer))
        letter = problem.source == "gpqa_diamond"  # "E" of MATH-500 is none
        assert evaluate.ask(problem) == (ASK_LETTER if letter else ASK_FREE)
    assert found == {name: rows for name, (_, rows) in READ.items()}
    assert ("amc23-1", "scottgeng00/amc_22-24:3") in {(p.id, p.where) for p in problems}


def test_options_are_shuffled_the_same_everywhere_and_evenly():
    assert with_options("Q?", "r", ["a", "b", "c"]) == ("Q?\n\n(A) c\n(B) r\n(C) b\n(D) a", "B")
    assert with_options("Q?", "r", ["c", "b", "a"]) == with_options("Q?", "r", ["a", "b", "c"])
    made = [with_options(f"Q{n}?", "r", ["a", "b", "c"]) for n in range(2000)]
    letters = [letter for _, letter in made]
    assert all(letters.count(letter) == pytest.approx(500, abs=75) for letter in "ABCD")
    assert len({text.partition("\n\n")[2] for text, _ in made}) == 24  # all orders occur


def test_your_own_problems_need_question_and_answer(tmp_path):
    path = tmp_path / "mine.jsonl"
    load_own = lambda path: load_problems(Args(model="", benchmark_file=(path,)))  # noqa: E731
    write_rows([{"question": "1+1?", "answer": 2}, {"question": "x?", "answer": "B"}], path)
    first, second = load_own(path)
    assert (first.id, first.answer, evaluate.ask(first)) == ("row-0", "2", ASK_FREE)
    assert (second.id, second.answer, evaluate.ask(second)) == ("row-1", "B", ASK_LETTER)
    with pytest.raises(InputError, match="has this name"):  # it would not be the paper's
        load_own(path.with_name("aime24.jsonl"))
    write_rows([{"question": "1?"}], path)
    with pytest.raises(InputError, match=r"mine\.jsonl"):
        load_own(path)


def test_an_answer_belongs_to_a_prompt_not_to_a_reference(monkeypatch):
    problem = Example("1", "1+1?", "", "2", "own")
    keys = {evaluate.key_of(problem), evaluate.key_of(replace(problem, answer="3", solution="B"))}
    assert len(keys) == 1
    for changes in {"question": "2+2?"}, {"id": "2"}, {"source": "more"}, {"answer": "B"}:
        keys.add(evaluate.key_of(replace(problem, **changes)))
    for name in ("SYSTEM_PROMPT", "ASK_FREE"):
        monkeypatch.setattr(models, name, "C")
        keys.add(evaluate.key_of(problem))
    assert len(keys) == 7


def results_of(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "results.json").read_text())


@slow
def test_a_stopped_evaluation_goes_on_over_two_ranks_where_it_was(tiny, tmp_path):
    folder, problems = tmp_path / "an evaluation", tiny / "heldout" / "keep.jsonl"
    call = ["evaluate.py", "--model", tiny / "model", "--output_dir", folder, "--num_samples", 8]
    call += ["--benchmark_file", problems, *TINY_LENGTHS[2:], "--verifier_workers", 1]
    process = start(*call, start_new_session=True)
    while not any(path.stat().st_size > 0 for path in folder.glob("answers.*")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    output = ended(process)
    assert process.returncode == 130 and "Traceback" not in output
    kept = (folder / "answers.rank0.jsonl").read_bytes()
    launch(*call, ranks=2)
    assert (folder / "answers.rank0.jsonl").read_bytes().startswith(kept)  # not sampled again
    assert len([*folder.glob("answers.*")]) == 2
    rows = [row for _, row in read_rows(str(folder / "samples.jsonl"))]
    order = [row["id"] for _, row in read_rows(str(problems))]
    assert [(row["id"], row["sample"]) for row in rows] == [(i, k) for i in order for k in range(8)]
    assert sum(row["correct"] for row in rows) > 0.95 * len(rows)  # to their own problems


@pytest.fixture
def run(tiny, tmp_path, one_rank, monkeypatch):
    """Runs an evaluation in this process, and returns what stood in for vLLM."""
    monkeypatch.setattr(evaluate, "init_ranks", lambda *_, **__: None)
    monkeypatch.setattr("cpu.available_memory", lambda: 2**34)
    (tmp_path / "reward.py").write_text(REWARD)
    setting = {"model": str(tiny / "model"), "output_dir": tmp_path / "eval", "precision": "fp32"}
    setting |= {"max_completion_length": 48, "verifier_workers": 1}
    setting["reward"] = f"{tmp_path}/reward.py:by_length"

    def run(vllm: StandIn | None = None, **flags) -> StandIn:
        vllm = vllm or StandIn()
        monkeypatch.setattr("rollout.import_vllm", lambda: vllm)
        assert evaluate.evaluate(Args(**setting | flags)) == 0
        return vllm

    return run


def own_file(path: Path, **problems: int) -> tuple[Path]:
    """A file of problems, given as question=answer."""
    write_rows([{"question": q, "answer": a} for q, a in problems.items()], path)
    return (path,)


def test_all_that_vllm_is_given_follows_from_the_flags(run, model_copy, tmp_path, monkeypatch):
    begin, tokenizer = "<|endoftext|>", model_copy / "tokenizer.json"
    single = [
        {"SpecialToken": {"id": begin, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    added = {"special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}}}
    added |= {"type": "TemplateProcessing", "single": single, "pair": single * 2}
    edit_json(tokenizer, post_processor=added)  # where a text begins; a prompt has it already
    files = own_file(tmp_path / "a.jsonl", **{"1+1": 2})
    files += own_file(tmp_path / "b.jsonl", **{"1+1": 2, "12+34": 46})
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 5}
    flags = {"num_samples": 2, "max_completion_length": 40, "seed": 3, "vllm_memory": 0.5}
    loaded, load = [], models.load_model
    monkeypatch.setattr(models, "load_model", lambda *given: loaded.append(given) or load(*given))
    cache = {"kv_cache_memory_bytes": 2**30}
    monkeypatch.setattr("cpu.vllm_options", lambda *given: {"given": given, **cache})
    model = str(model_copy)
    vllm = run(model=model, benchmark_file=files, **sampling, **flags)

    end = f"\n{ASK_FREE}<|im_end|>\n<|im_start|>assistant\n"
    texts = {q: f"<|im_start|>user\n{q}{end}" for q in ("1+1", "12+34")}
    ids = {q: TOKENIZER(text, add_special_tokens=False).input_ids for q, text in texts.items()}
    length = len(ids["12+34"]) + 40
    weights = 4 * models.count_parameters(model, length)
    bytes_of_all = (6 + 1) * kv_cache_bytes(model, length, "fp32")
    expected = {"model": model, "dtype": "float32", "load_format": "auto", "max_num_seqs": 6}
    expected |= {"max_model_len": length, "given": (0.5, weights, bytes_of_all, length)}
    assert expected.items() <= vllm.options.items() and loaded == [(model, length, "fp32")]
    shared = {"stop_token_ids": [END, 0], "flat_logprobs": True, "detokenize": False}
    problems = [("1+1", "a", 0), ("1+1", "b", 0), ("12+34", "b", 1)]
    asked = [(*problem, k) for k in range(2) for problem in problems]
    each = {**sampling, "n": 1, "max_tokens": 40, "logprobs": None, **shared}
    check = {"temperature": 1.0, "n": 4, "max_tokens": 32, "seed": 0, "logprobs": 0, **shared}
    assert vllm.requests == [
        (ids["1+1"], check),
        *((ids[q], {**each, "seed": derive_seed(3, a, f"row-{n}", k)}) for q, a, n, k in asked),
    ]


def test_a_stopped_evaluation_keeps_its_answers_and_goes_on_with_the_rest(run, tmp_path):
    def sampled(vllm: StandIn) -> list[int]:  # seeds
        return [params["seed"] for _, params in vllm.requests if params["logprobs"] is None]

    folder, file = tmp_path / "eval", own_file(tmp_path / "own.jsonl", **{"1+1": 2, "1+2": 3})
    seeds = [derive_seed(0, "own", f"row-{n}", k) for k in range(3) for n in range(2)]

    def stop_at_the_last(prompt, params, k) -> list[int]:
        if params["seed"] == seeds[2]:  # the stand-in ends it after the others
            raise KeyboardInterrupt
        return digits(prompt, params, k)

    assert sampled(run(benchmark_file=file, num_samples=1)) == seeds[:2]
    assert not run(benchmark_file=file, num_samples=1).options  # nothing is left to be sampled
    assert results_of(folder)["own"]["samples"] == 1
    (folder / "answers.rank0.jsonl").rename(folder / "answers.rank1.jsonl")  # of two ranks
    with pytest.raises(KeyboardInterrupt):
        run(StandIn(stop_at_the_last), benchmark_file=file, num_samples=3)
    kept = {path: path.read_bytes() for path in folder.glob("answers.*")}
    assert sum(each.count(b"\n") for each in kept.values()) == 5 and len(kept) == 2
    assert not {"results.json", "samples.jsonl"} & {path.name for path in folder.iterdir()}
    with (folder / "answers.rank0.jsonl").open("ab") as half:
        half.write(b'{"benchmark": "ea')  # as a kill may leave it
    assert sampled(run(benchmark_file=file, num_samples=3)) == seeds[2:3]
    assert all(path.read_bytes().startswith(before) for path, before in kept.items())
    assert read_args(folder)["vllm_runner"] == "V1"

    whole = tmp_path / "whole"
    assert sampled(run(benchmark_file=file, num_samples=3, output_dir=whole)) == seeds
    for name in ("samples.jsonl", "results.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    lines = (folder / "answers.rank0.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.rank7.jsonl").write_text("".join(lines[::-1]))  # all of them twice
    assert not run(benchmark_file=file, num_samples=2).options  # Others are kept, and not graded.
    assert results_of(folder)["own"]["samples"] == 2
    assert not run(benchmark_file=file, num_samples=3).options
    assert results_of(folder) == results_of(whole)


JUDGE = "def has(said, example):\n    return float(example.must + example.answer in said)\n"


def test_no_verdict_is_older_than_its_judge_its_reference_or_its_columns(run, tmp_path):
    path, folder = tmp_path / "own.jsonl", tmp_path / "eval"
    judge, asked = f"{tmp_path}/judge.py:has", []
    right = {"question": "1+1", "answer": "2", "must": ""}

    def score(row: dict, reward: str | None, code: str = JUDGE) -> float:
        write_rows([row], path)
        (tmp_path / "judge.py").write_text(code)
        vllm = Scripted({"1+1": [r"\boxed{2}"] * 2})
        run(vllm, benchmark_file=(path,), num_samples=2, reward=reward)
        asked.append(bool(vllm.options))
        return results_of(folder)["own"]["pass@1"]

    assert score(right | {"must": "ZZZ"}, judge) == 0
    assert score(right, judge) == 1
    assert score(right, judge, JUDGE.replace(" in ", " not in ")) == 0
    assert results_of(folder)["own"]["graded_by"]["reward"] == judge
    assert score(right, None) == 1
    assert score(right | {"answer": "3"}, None) == 0
    graded_by = results_of(folder)["own"]["graded_by"]
    assert graded_by["math-verify"] and graded_by["reward"] is None
    assert asked == [True] + [False] * 4  # The answers are those of the first command.
    [first, _] = [row for _, row in read_rows(str(folder / "samples.jsonl"))]
    assert (first["correct"], first["extracted"], first["answer"]) == (False, "2", "3")


def test_answers_to_other_problems_stay(run, tmp_path):
    one, two = (own_file(tmp_path / f"{n}.jsonl", **{"1+1": 2}) for n in ("one", "two"))
    for file in (one, two, one):
        vllm = run(benchmark_file=file, num_samples=1)
        assert [*results_of(tmp_path / "eval")] == [file[0].stem]
    assert not vllm.options


def test_a_benchmark_gets_its_number_of_answers_and_one_if_they_are_greedy(
    run, tmp_path, monkeypatch
):
    monkeypatch.setitem(BENCHMARKS, "math500", replace(BENCHMARKS["math500"], num_problems=1))
    own_file(tmp_path / "math500.jsonl", **{"1+1": 2})
    flags = {"benchmarks": ("math500",), "data_dir": tmp_path}
    flags["benchmark_file"] = own_file(tmp_path / "own.jsonl", **{"1+1": 2, "1+2": 3})
    for temperature, counts in ((0.6, (1, 16)), (0.0, (1, 1))):
        folder = tmp_path / f"eval-{temperature}"
        vllm = run(output_dir=folder, temperature=temperature, **flags)
        assert tuple(found["samples"] for found in results_of(folder).values()) == counts
        assert len(vllm.requests) == 1 + counts[0] + 2 * counts[1]


def test_the_table_and_the_results_say_what_the_answers_were(run, tmp_path, capsys):
    texts = {"1+1": [r"1+1=2 \boxed{2}", "1+1=2…", r"\boxed{3}"]}  # "2" is right without a box, too
    texts["2+2"] = [r"\boxed{5…", r"\boxed{5}", r"\boxed{6}…"]
    file = own_file(tmp_path / "own.jsonl", **{"1+1": 2, "2+2": 4})
    run(Scripted(texts), benchmark_file=file, num_samples=3, reward=None)
    line = capsys.readouterr().out.splitlines()[-3]
    assert line.split()[:6] == ["own", "2", "3", "50.0%", "16.7%", "33.3%"]
    results = results_of(tmp_path / "eval")["own"]
    assert (results["pass@1"], results["pass@3"]) == pytest.approx((1 / 3, 1 / 2))
    rows = [row for _, row in read_rows(str(tmp_path / "eval" / "samples.jsonl"))]
    assert results["completion_length_mean"] == sum(row["tokens"] for row in rows) / 6
    assert [row["correct"] for row in rows] == [True, True, False] + [False] * 3


def test_each_model_is_evaluated_into_a_folder_of_its_own(tmp_path, monkeypatch):
    write_args(tmp_path / "runs" / "oswft", args={})
    (tmp_path / "models" / "A").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, folder in [
        ("runs/oswft/final", "runs/oswft/eval"),
        ("runs/oswft/checkpoint-000050/", "runs/oswft/eval-checkpoint-000050"),
        ("models/A", "runs/A/eval"),
        ("Qwen/Qwen3-4B", "runs/Qwen3-4B/eval"),
    ]:
        assert evaluate.default_folder(name) == Path(folder)


def write_evaluation(folder: Path, num_samples: int, temperature=0.6, **right: list[int]) -> Path:
    """The report of an evaluation of which only the counts of right answers matter."""
    rows = [
        {"benchmark": name, "id": n, "problem": f"{name} {n}", "answer": "1", "correct": k < count}
        for name, counts in right.items()
        for n, count in enumerate(counts)
        for k in range(num_samples)
    ]
    write_rows(rows, folder / "samples.jsonl")
    judges = {name: {"graded_by": {"git_commit": "1"}} for name in right}
    write_json(judges, folder / "results.json")
    write_args(folder, setting=dict.fromkeys(evaluate.PROTOCOL) | {"temperature": temperature})
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
    results, samples = (second / name for name in ("results.json", "samples.jsonl"))
    for path, before, after, what in (
        (results, '"1"', '"2"', "another judge"),  # another commit
        (samples, '"answer": "1"', '"answer": "2"', "another problems or references"),
        (samples, '"own 0"', '"own 99"', "another problems or references"),
    ):
        text = path.read_text()
        path.write_text(text.replace(before, after))
        for refused in (tables.compare, lambda *both: tables.table(both)):
            with pytest.raises(InputError, match=f"own has {what}: type both"):
                refused(first, second)
        path.write_text(text)
    results.unlink()
    with pytest.raises(InputError, match="has no results: type its"):
        tables.compare(first, second)


BAD = [
    ("benchmarks", ("aime26",)),
    ("max_completion_length", 8192),  # more than the model reads
    ("num_samples", -1),
    ("benchmark_file", (Path("own.jsonl"), Path("own.jsonl"))),
    ("benchmark_file", (Path("special.jsonl"),)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_input_is_refused_before_anything_is_sampled(name, value, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows([{"question": "<|im_end|>", "answer": 4}], Path("special.jsonl"))
    write_rows([{"question": "2+2", "answer": 4}], Path("own.jsonl"))
    with pytest.raises(InputError):
        run(**{"benchmark_file": (Path("own.jsonl"),), name: value})
    assert not [*Path().glob("eval/answers.*")]


OTHER = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_completion_length": 40}
OTHER |= {"precision": "bf16", "seed": 1}


def test_answers_of_other_settings_are_not_mixed(run, model_copy, tmp_path, monkeypatch):
    file, folder = own_file(tmp_path / "own.jsonl", **{"1+1": 2}), tmp_path / "eval"
    flags = {"model": str(model_copy), "benchmark_file": file, "num_samples": 1}
    run(**flags)
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def refused(reason: str, **changes) -> None:
        with pytest.raises(InputError, match=rf"{reason}: choose another folder"):
            run(**flags | changes)

    for name, value in OTHER.items():
        refused(f"eval has another {name}", **{name: value})
    write_args(tmp_path / "run", args={})
    refused("holds something else", output_dir=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(models, "PROMPT", {})
        refused("another prompt")
    with (model_copy / "model.safetensors").open("ab") as weights:
        weights.write(b"0")  # trained on
    refused("another model_version")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


NATS = [  # by which vLLM is off, in each of four answers; whether it samples from another model
    ("fp32", [3e-4, 0, 0, 0], False),  # it is the mean that counts, over all of the tokens
    ("fp32", [6e-4, -6e-4, 0, 0], True),
    ("fp32", [0, 0, 0, 5e-4], True),
    ("fp32", [np.nan] * 4, True),
    ("bf16", [0.08] * 4, False),
    ("bf16", [0.15] * 4, True),
]


def test_a_model_that_vllm_computes_otherwise_is_not_scored(run, tmp_path):
    file = own_file(tmp_path / "own.jsonl", **{"1+1": 2})
    vllm, off = StandIn(), []

    def answer(prompt, params, k) -> list[int]:
        if params["logprobs"] is None:
            raise KeyboardInterrupt  # the check is passed
        vllm.off = off[k]
        return DIGITS

    vllm.answer = answer
    for precision, off[:], is_off in NATS:
        with pytest.raises(InputError if is_off else KeyboardInterrupt) as raised:
            run(vllm, benchmark_file=file, precision=precision)  # nothing is sampled: any setting
        assert not is_off or "nats a token off" in str(raised.value)


def test_a_prompt_that_is_not_the_runs_is_told(run, model_copy, tmp_path, capsys):
    file = own_file(tmp_path / "own.jsonl", **{"1+1": 2})
    for prompt, told in ((models.PROMPT, 0), ({**models.PROMPT, "free answer": "?"}, 1)):
        write_args(model_copy.parent, prompt=prompt)
        run(model=str(model_copy), temperature=0.0, benchmark_file=file)
        assert capsys.readouterr().err.count("was trained with another prompt") == told


OWN_REWARD = """
def half(completion, example):
    if not completion:
        raise MemoryError
    return {"0": 0, "1": 0.5, "2": 1}[completion] * int(example.source)
"""


def test_a_reward_of_ones_own_judges_the_answers_and_1_alone_is_right(run, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN_REWARD)
    write_rows([{"question": "1+1", "answer": "7", "source": "1"}], path := tmp_path / "own.jsonl")
    vllm, reward = Scripted({"1+1": ["0", "1", "2", ""]}), f"{tmp_path}/own.py:half"
    run(vllm, benchmark_file=(path,), reward=reward, num_samples=4)
    results = results_of(tmp_path / "eval")["own"]
    assert (results["pass@1"], results["ungraded_share"]) == (1 / 4, 1 / 4)
    assert "25.0% of the answers could not be graded" in capsys.readouterr().err


def test_a_model_that_training_refuses_is_not_scored(run, model_copy, tmp_path):
    edit_json(model_copy / "config.json", attention_bias=True)
    with pytest.raises(InputError, match="weights are missing"):
        run(model=str(model_copy), benchmark_file=own_file(tmp_path / "own.jsonl", **{"1+1": 2}))
    assert not (tmp_path / "eval" / "answers.rank0.jsonl").exists()
