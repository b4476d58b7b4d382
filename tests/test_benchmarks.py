"""The seven benchmarks: read from their sources' columns, with the right number of problems."""

import re
from dataclasses import replace

import pytest

from benchmarks import (
    BENCHMARKS,
    Problem,
    load_benchmark,
    load_problems,
    read_benchmark,
    with_options,
)
from conftest import SHARED, needs_shared
from data import InputError, write_rows
from prompts import ASK_FREE, ASK_LETTER, Prompt

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
READ = {  # benchmark -> what is read: (id, question, answer)
    "aime24": [(f"aime24-{n}", f"{n}+{n}?", f"{2 * n:03}") for n in range(3)],
    "aime25": [(f"aime25-{n}", f"{n}?", "336^\\circ") for n in range(3)],
    "amc22": [("amc22-0", "1+1?", "2")],
    "amc23": [("amc23-0", "2+2?", "4"), ("amc23-1", "3+3?", "6")],
    "amc24": [("amc24-0", "1+1?", "2"), ("amc24-1", "2+2?", "4"), ("amc24-2", "3+3?", "6")],
    "math500": [(f"math500-{n}", f"{n}?", "E") for n in range(3)],
}


def with_place(rows: list[dict]) -> list[tuple[str, dict]]:
    return [(f"file:{n}", row) for n, row in enumerate(rows, start=1)]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_read_from_the_columns_of_its_source(name):
    problems = read_benchmark(name, with_place(SOURCES[name]))
    asked = ASK_LETTER if name == "gpqa_diamond" else ASK_FREE  # also for the answer E
    assert {problem.instruction for problem in problems} == {asked}
    if name != "gpqa_diamond":
        assert [(p.id, p.question, p.answer) for p in problems] == READ[name]
    for problem in problems if name == "gpqa_diamond" else []:
        first, *options = problem.question.splitlines()
        assert first.startswith("Which one") and options.pop(0) == ""
        assert [option[:4] for option in options] == ["(A) ", "(B) ", "(C) ", "(D) "]
        assert {option[4:] for option in options} == {"right", "wrong 1", "wrong 2", "wrong 3"}
        assert f"({problem.answer}) right" in options


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_comes_from_its_split_on_the_hub_or_says_why_not(name, monkeypatch):
    calls = []

    def load_dataset(*place, split):
        calls.append((*place, split))
        return SOURCES[name]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(InputError, match=f"but {name} has {BENCHMARKS[name].num_problems};"):
        load_benchmark(name)
    (place,) = calls
    gpqa = ("Idavidrein/gpqa", "gpqa_diamond", "train")
    assert place == (gpqa if name == "gpqa_diamond" else (place[0], None, place[2]))
    assert place[2] == ("train" if name in ("aime24", "gpqa_diamond") else "test")


def test_options_are_shuffled_the_same_for_ever_and_evenly():
    assert with_options("Q?", "r", ["a", "b", "c"]) == (
        "Q?\n\n(A) c\n(B) r\n(C) b\n(D) a",
        "B",
    )
    letters = [with_options(f"Q{n}?", "r", ["a", "b", "c"])[1] for n in range(2000)]
    assert all(letters.count(letter) == pytest.approx(500, abs=75) for letter in "ABCD")
    texts = [with_options(f"Q{n}?", "r", ["a", "b", "c"])[0] for n in range(2000)]
    assert len({text.partition("\n\n")[2] for text in texts}) == 24  # all orders occur
    shuffled_input = with_options("Q?", "r", ["c", "b", "a"])
    assert shuffled_input == with_options("Q?", "r", ["a", "b", "c"])


def test_a_benchmark_with_another_number_of_problems_is_refused(tmp_path):
    path = tmp_path / "math500.jsonl"
    rows = [{"question": f"{n}?", "answer": "1"} for n in range(500)]
    write_rows(rows, path)
    assert len(load_benchmark("math500", tmp_path)) == 500
    write_rows(rows[1:], path)
    with pytest.raises(InputError, match="has 499 problems, but math500 has 500"):
        load_benchmark("math500", tmp_path)


def test_problems_of_ones_own_need_question_and_answer(tmp_path):
    path = tmp_path / "own.jsonl"
    write_rows([{"question": "1+1?", "answer": 2}, {"question": "x?", "answer": "B"}], path)
    first, second = load_problems(str(path))
    assert (first.id, first.answer, first.instruction) == ("row-0", "2", ASK_FREE)
    assert (second.id, second.answer, second.instruction) == ("row-1", "B", ASK_LETTER)
    for rows, message in [
        ([{"question": "1+1?"}], "own.jsonl:1: field 'answer' is missing"),
        ([{"question": "", "answer": "1"}], "own.jsonl:1: field 'question' must be a non-empty"),
        ([{"question": "1?", "answer": [1]}], "field 'answer' must be a non-empty text or a num"),
        ([{"question": "1?", "answer": "1", "id": 3}] * 2, "own.jsonl:2: id '3' was used before"),
        ([], "the data set is empty"),
    ]:
        write_rows(rows, path)
        with pytest.raises(InputError, match=re.escape(message)):
            load_problems(str(path))


def test_a_fingerprint_covers_the_whole_prompt_and_the_reference_but_not_the_date():
    problem, plain = Problem("1", "1+1?", "2", ASK_FREE), Prompt(date="2024-02-29")
    same = Problem("other", "1+1?", "2", ASK_FREE).fingerprint(Prompt(date="2024-03-01"))
    for alike in (plain, Prompt(prompt_suffix=ASK_FREE), Prompt(system_prompt="")):
        assert problem.fingerprint(alike) == same
    others = [
        *(replace(problem, **{name: "B"}) for name in ("question", "answer", "instruction")),
        *(Prompt(prompt_suffix=suffix) for suffix in ("", "C")),
        *(Prompt(system_prompt=system) for system in ("A", "B")),
    ]
    prints = {
        problem.fingerprint(x) if isinstance(x, Prompt) else x.fingerprint(plain) for x in others
    }
    assert len(prints | {same}) == 8


@needs_shared
def test_the_copies_of_real_benchmarks_are_read_and_their_references_are_readable():
    for name, answers in {
        "aime24": {"204"},
        "aime25": {"336^\\circ"},
        "math500": {"p - q"},
    }.items():
        problems = load_benchmark(name, SHARED / "data")
        assert answers <= {problem.answer for problem in problems}
    with pytest.raises(InputError, match="has 40 problems, but amc23 has 46"):
        load_benchmark("amc23", SHARED / "data")
    assert len(load_problems(str(SHARED / "data" / "amc23.jsonl"))) == 40
