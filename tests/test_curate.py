"""Curation: which rows of the raw release are kept, why the others are not, and what is drawn."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import prepare.curate
from data import Example, InputError, load_examples, write_rows
from models import load_tokenizer, tokenize_examples
from prepare.curate import MAX_QUESTION, REASONS, Args, Sifter, load_questions, normalize
from templates import CASES, make_tokenizer

import pytest

QUESTION = "What is 3 + 4?\n(A) 5 (B) 6 (C) 7 (D) 8"
THINKING = "Three and four make seven."
SAID = "The sum is 7.\n\n**Answer:** $\\boxed{C}$"
TEXT = "<think>\n{thinking}\n</think>\n<answer>\n{said}\n</answer>"
BENCHMARK = [  # 14 words; fewer than 13; with LaTeX; with options
    "A ferry leaves the harbour every twelve minutes and carries exactly ninety people across.",
    "How many primes are even?",
    "Let $f(x) = \\dfrac{x}{2}$. Find the least $n$ such that $f(n) + f(n+1) + f(n+2) > 100$.",
    "Which one is odd? (A) 2 (B) 4 (C) 5",
]


def row(n=0, question=QUESTION, thinking=THINKING, said=SAID, text=TEXT, assistant=None, **info):
    """A row as the release has it; `n` makes its question another one."""
    if isinstance(text, str):
        text = text.replace("{thinking}", thinking).replace("{said}", said)
    info = {"source": "NuminaMath_1.5", "ground_truth": "C", "verify_score": 1.0, **info}
    told = {"think_content": thinking, "answer_content": said} if assistant is None else assistant
    question = question if n is None else f"[{n}] {question}"
    human = {"from": "human", "value": question, "info": info}
    return {"conversations": [human, {"from": "assistant", "value": text, "info": told}]}


HUMAN, ASSISTANT = row()["conversations"]
REJECTED = {
    "malformed": [
        "{half a row",
        {"conversations": [{"from": "human", "value": 7}, ASSISTANT]},
        row(text=SAID, assistant={"think_content": "Seven."}),
        row(text="<think>a</think> b <think>c</think> \\boxed{C}"),
        row(question=QUESTION + " " * 9 + "x" * MAX_QUESTION),
        row(thinking="It ends<|im_end|> here."),
    ],
    "not_source": [row(source=source) for source in ("openR1Math", None)],
    "not_multiple_choice": [row(ground_truth=reference) for reference in (None, 7, "E")],
    "no_single_answer": [
        row(said="\\boxed{A} or \\boxed{C}"),
        row(thinking="So \\boxed{C}.", said="It is seven."),
    ],
    "answer_mismatch": [row(said="\\boxed{B}")],
    "verify_score": [row(verify_score=score) for score in ("0.5", 0.89)],
    "too_long": [row(thinking="x" * 1000), row(said="y" * 1000 + SAID)],
    "benchmark_overlap": [
        row(question=f"{' '.join(BENCHMARK[0].split()[:13])} (A) 1 (B) 2 (C) 3"),
        row(None, question="Say: how many primes are even, if any? (A) 0 (B) 1 (C) 2"),
        row(None, question="Which one is odd?\n\nA. $2$\nB. $4$\nC. $5$"),
        row(question=BENCHMARK[2].replace("\\dfrac", "\\frac") + "\nA. 1 B. 2 C. 3"),
    ],
    "duplicate": [
        row(1),
        row(1, question=QUESTION.upper().replace(" + ", "+").replace("(A)", "\\textbf{(A)}\\ ")),
    ],
}
ALL_REJECTED = [row for rows in REJECTED.values() for row in rows]
KEPT = [
    row(1),
    row(2, text="{thinking}</think>\n\n{said}", assistant=[]),
    *(row(3 + n, text=text) for n, text in enumerate((SAID, None, "<think>Seven.</think>"))),
    *(row(6 + n, verify_score=score) for n, score in enumerate((None, "nan", 10**400, {}, 0.9))),
    row(11, ground_truth="\\textbf{(C)}", extra={"a": [1]}),
    row(12, source=None, assistant={"source": "numina"}),
    row(13, assistant={"source": "openR1Math"}),  # what the question says is its own
    row(14, said="The answer is (C)."),
    {"conversations": [{**ASSISTANT, "from": "gpt"}, {**HUMAN, "from": "user"}]},
    row(15, question=f"{' '.join(BENCHMARK[0].split()[:12])} and goes (A) 1 (B) 2 (C) 3"),
]


def to_line(row: dict | str) -> bytes:
    return (row if isinstance(row, str) else json.dumps(row)).encode() + b"\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(CASES["chatml"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    write_rows([{"problem": text, "answer": "1"} for text in BENCHMARK], folder / "aime24.jsonl")
    return folder


@pytest.fixture
def curate(tmp_path, tokenizer, benchmarks):
    """Curate rows (or the files that are given), and return (examples, report)."""

    def curate(rows=(), **args) -> tuple[list[Example], dict]:
        path, output = tmp_path / "math.jsonl", tmp_path / "train.jsonl"
        path.write_bytes(b"".join(map(to_line, rows)))
        defaults = {"input": (path,), "tokenizer": tokenizer, "output": output, "num_workers": 2}
        defaults |= {"max_solution_tokens": 400, "benchmarks_dir": benchmarks}
        prepare.curate.curate(Args(**{**defaults, **args}))
        report = json.loads(output.with_suffix(".report.json").read_text())
        return load_examples(str(output)), report

    return curate


@pytest.fixture(scope="module")
def make_sifter(tokenizer, benchmarks):
    tokens, questions = load_tokenizer(tokenizer), load_questions(benchmarks)
    args = Args(input=(), tokenizer=tokenizer)
    return lambda limit=400: Sifter(replace(args, max_solution_tokens=limit), tokens, questions)


def test_a_row_is_rejected_for_its_reason_and_counted(curate, make_sifter):
    for reason in REASONS[:-1]:  # that a row is a duplicate is not seen in the row
        verdicts = [make_sifter().sift(to_line(each)) for each in REJECTED[reason]]
        assert verdicts == [reason] * len(verdicts)
    examples, report = curate(["", *KEPT, *ALL_REJECTED, "  \r"])
    form = r"<think>\nThree and four make seven\.\n</think>\n\n\S.*\\boxed\{C\}"
    assert all(re.fullmatch(form, example.solution, re.DOTALL) for example in examples)
    assert report["rejected"] == {reason: len(REJECTED[reason]) for reason in REASONS}
    assert report["questions_that_pass"] == report["examples"] == len(examples) == len(KEPT)
    assert report["rows"] == len(KEPT) + len(ALL_REJECTED)


def test_the_limit_counts_every_token_of_the_solution_and_the_end_of_turn(make_sifter):
    example = make_sifter().sift(to_line(row()))
    assert example.question == f"[0] {QUESTION}" and example.source == "NuminaMath_1.5"
    [tokenized], _ = tokenize_examples([example], make_sifter().tokenizer, 10_000, 0)
    length = len(tokenized.response_ids)
    verdicts = [make_sifter(limit).sift(to_line(row())) for limit in (length, length - 1)]
    assert verdicts == [example, "too_long"]
    defaults = Args((), "")  # the paper's
    assert (defaults.max_solution_tokens, defaults.num_examples) == (4096, 10_000)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"$\left( \dfrac{1}{2} \right)$ of \textbf{it}.", r"\(\frac{1}{2}\)  of it", True),
        (r"$0 \leq x \neq 3$ and $x \ge 5$", r"$0 \le x \ne 3$ and $x ≥ 5$", True),
        (r"Find $\frac12 \cdot 30^{\circ}$", r"Find $\dfrac{1}{2}·30°$", True),
        (r"$x^2 + y^{12} \times \sqrt{3}\pi$, ...", r"x² + y¹² × √3π, $\ldots$", True),
        (r"$x \leftarrow y$", r"$x \le y$", False),
        ("x²", "x2", False),
        ("\u22123 + 5", "3 + 5", False),
        ("f'(2)", "f(2)", False),
    ],
)
def test_questions_are_compared_without_layout_but_with_operators(one, other, same):
    assert (normalize(one) == normalize(other)) == same


def test_the_draw_depends_on_the_seed_and_the_set_of_rows_alone(curate, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.curate, "BLOCK", 10_000)
    rows = [row(i, thinking=f"Thought {i}.") for i in range(90)]
    rows += [row(i, thinking=f"Other thought {i}.") for i in range(0, 90, 3)] + ALL_REJECTED
    once, report = curate(rows, num_examples=30, num_workers=1)
    written = (tmp_path / "train.jsonl").read_bytes()
    assert len(once) == 30 and report["questions_that_pass"] == 90
    random.Random(0).shuffle(rows)
    files = [tmp_path / name for name in "abc"]
    for start, file in enumerate(files):
        file.write_bytes(b"".join(map(to_line, rows[start::3])))
    curate(input=tuple(files), num_examples=30, num_workers=3)
    assert (tmp_path / "train.jsonl").read_bytes() == written
    larger, _ = curate(rows, num_examples=1000)
    assert len(larger) == 90 and larger[:30] == once
    assert curate(rows, num_examples=30, seed=1)[0] != once


@pytest.mark.parametrize(
    "args", [{"output": Path("math.jsonl")}, {"source": "none"}, {"benchmarks_dir": Path()}]
)
def test_an_input_is_not_replaced_and_no_wrong_set_is_written(curate, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        curate(KEPT, **args)
    [path] = tmp_path.iterdir()
    assert path.read_bytes() == b"".join(map(to_line, KEPT))
