"""Curation: which rows of the raw release are kept, why the others are not, and what is drawn."""

import errno
import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data
import prepare.curate
from conftest import ROOT, SHARED, needs_shared, released
from data import InputError
from demo.tiny import CHAT_TEMPLATE, make_tokenizer
from evaluate import BENCHMARKS
from prepare.curate import (
    MAX_QUESTION,
    REASONS,
    Args,
    HashedFile,
    normalize,
    submit_blocks,
    word_runs,
)
from verify import is_correct

QUESTION = "What is 3 + 4?\n(A) 5 (B) 6 (C) 7 (D) 8"
SAID = "The sum is 7.\n\n**Answer:** $\\boxed{C}$"
BENCHMARK = [  # 14 words; fewer than 13; with LaTeX; with options
    "A ferry leaves the harbour every twelve minutes and carries exactly ninety people across.",
    "How many primes are even?",
    "Let $f(x) = \\dfrac{x}{2}$. Find the least $n$ such that $f(n) + f(n+1) + f(n+2) > 100$.",
    "Which one is odd? (A) 2 (B) 4 (C) 5",
]


def row(
    number: int | None = 0,
    *,
    question: str = QUESTION,
    thinking: str = "Three and four make seven.",
    said: str = SAID,
    text: object = None,
    human: object = None,
    assistant: object = None,
    **info,
) -> dict:
    """A row as the release has it; `number` makes its question another one."""
    if text is None:
        text = f"<think>\n{thinking}\n</think>\n<answer>\n{said}\n</answer>"
    info = {"source": "NuminaMath_1.5", "category": "math", "ground_truth": "C", **info}
    told = {"think_content": thinking, "answer_content": said, "model_name": "Qwen3-235B-A22B"}
    told["verify_score"] = info.pop("verify_score", 1.0)
    question = question if number is None else f"[{number}] {question}"
    return {
        "system": "Think first.",
        "conversations": [
            {"from": "human", "value": question} | {"info": info if human is None else human},
            {"from": "assistant", "value": text}
            | {"info": told if assistant is None else assistant},
        ],
    }


def without(row: dict, turn: int, field: str) -> dict:
    turns = [dict(each) for each in row["conversations"]]
    del turns[turn][field]
    return {**row, "conversations": turns}


REJECTED = {
    "malformed": [
        "{half a row",
        "[1, 2, 3]",
        "null",
        '"\\ud800"',
        b"\xff\xfe\n",
        "[" * 100_000,
        {},
        {"conversations": None},
        {"conversations": "human"},
        {"conversations": [1, None]},
        {"conversations": row()["conversations"][:1]},
        {"conversations": row()["conversations"] * 2},
        {"conversations": [{"from": "human", "value": 7}, row()["conversations"][1]]},
        without(row(), 0, "value"),
        without(row(), 1, "from"),
        row(text="", assistant=[]),
        row(text=SAID, assistant="none"),
        row(thinking=" "),
        row(said=""),
        row(text="<think>a</think> b <think>c</think> \\boxed{C}"),
        row(question="\ud800 " + QUESTION),
        row(source="numina \udfff"),
        row(question=QUESTION + " " * 9 + "x" * MAX_QUESTION),
        row(thinking="It ends<|im_end|> here."),
    ],
    "not_source": [
        row(source="openR1Math"),
        row(source=None),
        row(source=["NuminaMath"]),
        row(human=3),
        row(human=[]),
    ],
    "not_multiple_choice": [
        row(ground_truth="7"),
        row(ground_truth=None),
        row(ground_truth=7),
        row(ground_truth="AC"),
        row(ground_truth="E"),
        row(question="What is 3 + 4?"),
        row(question="What is 3 + 4, given (C)?"),
        row(question="Prove (a) that 3 + 4 = 7, and (b) that 7 is prime, (c) alone"),
    ],
    "no_single_answer": [
        row(said="It is 7."),
        row(said="$\\boxed{7}$"),
        row(said="\\boxed{A, C}"),
        row(said="\\boxed{A} or \\boxed{C}"),
        row(said="The answer is (C) or (D)."),
        row(said="\\boxed{C"),
        row(thinking="So \\boxed{C}.", said="It is seven."),
    ],
    "answer_mismatch": [
        row(said="\\boxed{B}"),
        row(said="The answer is (B)."),
        row(ground_truth="(D)"),
    ],
    "verify_score": [
        row(verify_score=score) for score in (0, 0.0, False, "0", "0.5", "false", "Wrong", 0.89)
    ],
    "too_long": [
        row(thinking="x" * 1000),
        row(thinking="x" * 5000),
        row(said="y" * 1000 + SAID),
    ],
    "duplicate": [
        row(1),
        row(1, thinking="Another way of thinking."),
        row(1, question=QUESTION.upper().replace(" + ", "+").replace("(A)", "\\textbf{(A)}\\ ")),
    ],
    "benchmark_overlap": [
        row(question=f"Once more: {BENCHMARK[0]} (A) 1 (B) 2 (C) 3"),
        row(question=" ".join(BENCHMARK[0].split()[1:]).upper() + "\nA. 1 B. 2 C. 3"),
        row(None, question="How many primes are \\textbf{even}?\n(A) 0 (B) 1 (C) 2"),
        row(None, question="Which one is odd?\n\nA. $2$\nB. $4$\nC. $5$"),
        row(question=BENCHMARK[2].replace("\\dfrac", "\\frac") + "\nA. 1 B. 2 C. 3"),
    ],
}
ALL_REJECTED = [row for rows in REJECTED.values() for row in rows]
KEPT = [
    row(1),
    row(2, text=f"Three and four make seven.</think>\n\n{SAID}"),
    row(3, text=f"Three and four make seven.<answer>{SAID}</answer>"),
    row(4, text=SAID),
    row(5, text=None, verify_score=None),
    row(6, text=f"<think>Three and four make seven.</think><answer>{SAID}", assistant=False),
    row(7, verify_score="1.0", ground_truth="\\textbf{(C)}", category=None, extra={"a": [1]}),
    row(8, human={}, assistant={"source": "numina", "ground_truth": "C"}),
    row(9, source="AI-MO/numinamath-cot", question="3+4=?\n\nA.5\nB.6\nC.7"),
    row(10, question="3 + 4? $\\textbf{(A)}\\ 5 \\qquad \\mathrm{(B)}\\ 6\\qquad\\text{(C) }7$"),
    row(11, said="So it is (C), as\n\n\\boxed{\\text{(C)}}\n\nshows."),
    row(12, said="The answer is (C)."),
    row(13, verify_score={"score": 0}),
    row(18, verify_score=10**400),
    row(20, verify_score=0.9),
    row(21, text=f"<answer>{SAID}</answer>"),
    row(22, text="<think>Three and four make seven.</think>"),
    row(19, verify_score="nan"),
    {**row(14), "conversations": row(14)["conversations"][::-1], "system": None},
    without(row(15), 1, "info"),
    row(16, question=f"{' '.join(BENCHMARK[0].split()[:12])} and goes (A) 1 (B) 2 (C) 3"),
    row(17, question=f"{BENCHMARK[1][:-1]} and odd? (A) 1 (B) 2 (C) 3"),
]
KEPT[4]["conversations"][1]["value"] = None  # all of it stands in `info`


def to_line(row: dict | str | bytes) -> bytes:
    if isinstance(row, bytes):
        return row
    return (row if isinstance(row, str) else json.dumps(row)).encode() + b"\n"


def save_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of bytes."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>"]
    tokens = Tokenizer(models.BPE({token: id for id, token in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        additional_special_tokens=alphabet[-2:],
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def save_benchmarks(folder: Path) -> Path:
    """Write a copy of one of the benchmarks."""
    rows = [{"problem": question, "answer": "1"} for question in BENCHMARK]
    (folder / "aime24.jsonl").write_bytes(b"".join(map(to_line, rows)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory) -> Path:
    return save_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture
def curate(tmp_path, tokenizer, benchmarks):
    """Curate rows (or the files that are given), and return (examples, report)."""

    def curate(rows=(), **args) -> tuple[list[dict], dict]:
        path = tmp_path / "math.jsonl"
        path.write_bytes(b"".join(map(to_line, rows)))
        output = args.pop("output", tmp_path / "train.jsonl")
        defaults = {
            **{"input": (path,), "tokenizer": str(tokenizer), "output": output},
            **{"max_solution_tokens": 400, "benchmarks_dir": benchmarks, "num_workers": 2},
            **{"allow_fewer": True},
        }
        prepare.curate.curate(Args(**{**defaults, **args}))
        report = json.loads(output.with_suffix(".report.json").read_text())
        return [example.columns for example in data.load_examples(str(output))], report

    return curate


# ---- rules


@pytest.mark.parametrize("reason", REJECTED)
def test_a_row_is_rejected_for_its_reason_and_counted(curate, reason):
    rows = REJECTED[reason]
    assert len(rows) >= 3
    examples, report = curate([*KEPT, *rows])
    assert len(examples) == len(KEPT) and report["rows"] == len(KEPT) + len(rows)
    assert report["rejected"] == {name: len(rows) * (name == reason) for name in REASONS}


def test_all_reasons_are_counted_side_by_side_and_by_source(curate):
    rows = [*KEPT, *ALL_REJECTED]
    examples, report = curate(rows)
    assert list(report["rejected"]) == list(REASONS) == list(REJECTED)
    assert report["rejected"] == {reason: len(rows) for reason, rows in REJECTED.items()}
    assert report["questions_that_pass"] == report["examples"] == len(examples) == len(KEPT)
    assert report["sources"]["openR1Math"]["not_source"] == 1
    numina = report["sources"]["NuminaMath_1.5"]
    assert numina["too_long"] == 3 and numina["examples"] == len(KEPT) - 2
    assert sum(sum(counts.values()) for counts in report["sources"].values()) == len(rows) + len(
        examples
    )
    assert report["answers"] == {"C": len(KEPT)}
    text = b"".join(map(to_line, rows))
    [source] = report["inputs"]
    assert (source["bytes"], source["sha256"]) == (len(text), hashlib.sha256(text).hexdigest())


def test_of_several_reasons_the_first_one_counts(curate):
    values = {"source": "x", "ground_truth": "7", "said": "?", "verify_score": 0}
    values |= {"thinking": "x" * 1000, "question": f"{BENCHMARK[0]} (A) 1 (B) 2 (C) 3 (D) 4"}
    mended = {  # reason -> what has been mended until it is the first
        "not_source": {},
        "not_multiple_choice": {"source": "numina"},
        "no_single_answer": {"ground_truth": "D"},
        "answer_mismatch": {"said": SAID},
        "verify_score": {"ground_truth": "C"},
        "too_long": {"verify_score": 1},
        "benchmark_overlap": {"thinking": "Easy."},
    }
    rows = [row(**(values := values | change)) for change in mended.values()]
    _, report = curate([*KEPT, *rows, rows[-1], row(said="")])
    assert report["rejected"] == dict.fromkeys(REASONS, 1)


def test_a_source_is_a_part_of_its_name_in_any_case(curate):
    rows = [row(1, source="OpenR1-Math"), row(2, source="openr1"), row(3), row(4, source=None)]
    examples, _ = curate(rows, source="OPENR1")
    assert sorted(example["source"] for example in examples) == ["OpenR1-Math", "openr1"]
    examples, _ = curate(rows, source="")
    assert len(examples) == 4 and "unknown" in {example["source"] for example in examples}


def test_a_solution_is_thinking_and_answer_and_ends_in_the_boxed_letter(curate):
    examples, _ = curate(KEPT)
    for example in examples:
        assert re.fullmatch(
            r"<think>\nThree and four make seven\.\n</think>\n\n\S.*\\boxed\{C\}",
            example["solution"],
            flags=re.DOTALL,
        )
        assert is_correct(example["solution"], example["answer"])
    [plain] = curate([row()])[0]
    assert plain == {
        "id": plain["id"],
        "question": f"[0] {QUESTION}",
        "solution": "<think>\nThree and four make seven.\n</think>\n\n"
        "The sum is 7.\n\n**Answer:** \\boxed{C}",
        "answer": "C",
        "source": "NuminaMath_1.5",
    }


def test_the_limit_counts_every_token_of_the_solution_and_the_end_of_turn(curate, tokenizer):
    [example], report = curate([row()])
    tokens = data.load_tokenizer(str(tokenizer))
    [tokenized], _ = data.tokenize_examples([data.Example(**example)], tokens, 10_000, 0)
    length = len(tokenized.completion_ids)
    assert report["solution_tokens"]["max"] == length
    assert len(curate([row()], max_solution_tokens=length)[0]) == 1
    with pytest.raises(InputError, match="no row passes every rule"):
        curate([row()], max_solution_tokens=length - 1)


def test_the_benchmark_check_is_switched_off_only_by_its_flag(curate, tmp_path, capsys):
    overlapping = REJECTED["benchmark_overlap"]
    examples, report = curate([*KEPT, *overlapping], skip_benchmark_check=True)
    assert len(examples) == len(KEPT) + len(overlapping) and report["benchmarks"] == {}
    _, report = curate(KEPT)
    assert report["benchmarks"] == dict.fromkeys(BENCHMARKS, 0) | {"aime24": 4}
    assert "aime24 26 of 30, aime25 30 of 30, amc22 43 of 43" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"has none of aime24\.jsonl, "):
        curate(KEPT, benchmarks_dir=tmp_path)


def test_benchmarks_that_the_hub_does_not_give_are_an_error(curate, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = "or give a folder that has aime24.jsonl with --benchmarks_dir"

    def fail(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(InputError, match=message):
        curate(KEPT, benchmarks_dir=None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is $x + 1$?", "what is x+1", True),
        (r"Find $\dfrac{1}{2}$ of \textbf{it}.", r"Find \(\frac{1}{2}\)  of it", True),
        (r"$\left( x \right) \displaystyle y$", "(x) y", True),
        ("x + 1", "x - 1", False),
        ("12", "1 2", False),
        ("x \u2264 3", "x \u2265 3", False),
        ("\u22123 + 5", "3 + 5", False),
        ("f'(2)", "f(2)", False),
        ("\uff11\uff12 \ufb01ne", "12 fine", True),  # full width, a ligature
        (r"\dfrac12", r"\frac12", True),
        ("How many?", "How much?", False),
    ],
)
def test_questions_are_compared_without_layout_but_with_operators(one, other, same):
    assert (normalize(one) == normalize(other)) == same


def test_a_run_of_words_has_thirteen_words_and_numbers_whatever_stands_between():
    assert list(word_runs("1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 = 66")) == []
    assert len(list(word_runs("a b c + d e f g h i j k l m = n"))) == 2


# ---- the draw


def many(num_rows: int = 300) -> list[dict]:
    """Rows of which one in three asks what another asks, with another solution."""
    rows = [row(i, thinking=f"Thought {i}.", source=f"numina-{i % 3}") for i in range(num_rows)]
    again = [row(i, thinking=f"Other thought {i}.") for i in range(0, num_rows, 3)]
    return [*rows, *again, *ALL_REJECTED]


def test_order_files_and_workers_do_not_matter(curate, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.curate, "BLOCK", 20_000)
    rows = many()
    once, report = curate(rows, num_examples=100, num_workers=1)
    assert len(once) == 100 and report["questions_that_pass"] == 300
    random.Random(0).shuffle(rows)
    lines = list(map(to_line, rows))
    parts = [b"".join(lines[start::3]) for start in range(3)]
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst")]
    files[0].write_bytes(parts[0])
    files[1].write_bytes(gzip.compress(parts[1][:9999]) + gzip.compress(parts[1][9999:]))
    zstd = pyarrow.Codec("zstd")
    files[2].write_bytes(b"".join(bytes(zstd.compress(lines[i])) for i in range(2, len(lines), 3)))
    again, other = curate(input=tuple(files), num_examples=100, num_workers=3)
    assert again == once
    same = ("rows", "rejected", "sources", "answers", "solution_tokens", "output_sha256")
    assert {name: report[name] for name in same} == {name: other[name] for name in same}


def test_the_same_call_gives_the_same_bytes_and_another_seed_another_draw(curate, tmp_path):
    rows = many(60)
    written = []
    for seed in (0, 0, 1):
        curate(rows, num_examples=20, seed=seed)
        names = ("train.jsonl", "train.report.json", "train.png")
        written.append([(tmp_path / name).read_bytes() for name in names])
    assert written[0] == written[1] and written[0][0] != written[2][0]
    assert written[0][2].startswith(b"\x89PNG") and not list(tmp_path.glob("*.partial"))


def test_an_id_stands_for_the_question_alone(curate):
    [one], [same] = (curate([row(thinking=text)], seed=len(text))[0] for text in ("One.", "Other."))
    assert one["id"] == same["id"] and one["solution"] != same["solution"]
    assert curate([row(1)])[0][0]["id"] != one["id"]


def test_a_smaller_draw_is_the_beginning_of_a_larger_one(curate):
    rows = many(60)
    small, large = (curate(rows, num_examples=n)[0] for n in (10, 40))
    assert large[:10] == small
    assert curate(rows, num_examples=1000)[0][:40] == large


# ---- input and output


def test_a_row_that_is_too_long_for_memory_is_malformed(curate, monkeypatch):
    monkeypatch.setattr(prepare.curate, "MAX_ROW", 5000)
    long = [row(50 + i, thinking="x" * n) for i, n in enumerate((5000, 20_000))]
    whole = len(to_line(row(90, thinking="")))  # a row of exactly the limit is read
    exact = row(90, thinking="x" * ((5000 - whole) // 2))
    assert len(to_line(exact)) in (4999, 5000)
    examples, report = curate([KEPT[0], *long, exact, KEPT[1]], max_solution_tokens=5000)
    assert len(examples) == 3 and report["rejected"]["malformed"] == 2


def test_only_a_few_blocks_are_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.curate, "BLOCK", 1)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n" * 100)
    submitted = []
    pool = SimpleNamespace(submit=lambda _, block: submitted.append(block))
    for done, _ in enumerate(submit_blocks([HashedFile(path)], pool, ahead=4)):
        assert len(submitted) <= done + 5
    assert len(b"".join(line for block in submitted for line in block)) == 300


def test_half_a_row_at_the_end_and_empty_lines_lose_nothing_else(curate):
    rows = [to_line(each) for each in KEPT]
    examples, report = curate([b"\n", *rows[:-1], b"  \r\n", rows[-1][:-20]])
    assert len(examples) == len(KEPT) - 1 and report["rejected"]["malformed"] == 1


@pytest.mark.parametrize("name", ["cut.gz", "cut.zst", "flipped.gz", "text.gz", "text.zst"])
def test_an_unreadable_archive_is_named_and_nothing_is_written(curate, tmp_path, name):
    text = b"".join(map(to_line, many(50)))
    packed = (
        gzip.compress(text) if name.endswith("gz") else bytes(pyarrow.Codec("zstd").compress(text))
    )
    if name.startswith("cut"):
        packed = packed[:-30]
    elif name.startswith("flipped"):
        packed = packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:]  # its checksum
    else:
        packed = text
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(InputError, match=rf"{re.escape(name)}: cannot be read: "):
        curate(input=(tmp_path / name,))
    assert not list(tmp_path.glob("train*"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"input": ()}, "--input needs at least one file"),
        ({"input": (Path("absent.jsonl"),)}, "absent.jsonl: no such file"),
        ({"tokenizer": "/absent"}, "/absent"),
        ({"num_examples": 0}, "--num_examples must be at least 1, got 0"),
        ({"num_workers": -1}, "--num_workers must be at least 1, got -1"),
        ({"output": ROOT}, "must be a file that ends in .jsonl"),
        ({"output": Path("train.png")}, "must be a file that ends in .jsonl"),
        ({"source": "other"}, "no row passes every rule; nothing was written"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(curate, tmp_path, args, message):
    with pytest.raises((InputError, OSError), match=message):
        curate(KEPT, **args)
    assert [path.name for path in tmp_path.iterdir()] == ["math.jsonl"]


def test_an_output_that_is_an_input_is_refused(curate, tmp_path):
    with pytest.raises(InputError, match="would replace an input"):
        curate(KEPT, output=tmp_path / "math.jsonl")


def test_a_file_without_any_row_is_said_so(curate):
    with pytest.raises(InputError, match="no row can be read: is it the release's JSONL"):
        curate(["PK", "<html>"])


def test_a_full_disk_leaves_the_former_file_and_no_half_one(curate, tmp_path, monkeypatch):
    examples, _ = curate(KEPT)

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match=r"train\.jsonl: cannot be written: No space left"):
        curate(KEPT[:3])
    assert len(data.load_examples(str(tmp_path / "train.jsonl"))) == len(examples)
    assert not list(tmp_path.glob("*.partial"))


def test_too_few_examples_are_written_and_said_so(curate, tmp_path):
    message = f"only {len(KEPT)} of --num_examples 10,000 were found; they are written"
    with pytest.raises(InputError, match=message):
        curate(KEPT, allow_fewer=False)
    assert len(data.load_examples(str(tmp_path / "train.jsonl"))) == len(KEPT)


def test_a_killed_worker_ends_the_run_with_one_line(curate, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.curate, "_sift", kill_worker)
    with pytest.raises(InputError, match="a worker was killed"):
        curate(KEPT)
    assert not list(tmp_path.glob("train*"))


def kill_worker(lines: list[bytes]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_run_that_is_stopped(tmp_path, tokenizer, end):
    rows = b"".join(to_line(row(i, thinking="x" * 3000)) for i in range(1000))
    (tmp_path / "math.jsonl").write_bytes(rows * 10)
    command = [sys.executable, "-m", "prepare.curate", "--input", tmp_path / "math.jsonl"]
    command += ["--tokenizer", tokenizer, "--skip_benchmark_check"]
    command += ["--output", tmp_path / "train.jsonl"]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = []
    while not workers or workers[0].cpu_times().user < 0.2:
        time.sleep(0.05)
        assert process.poll() is None
        workers = psutil.Process(process.pid).children()
    os.killpg(process.pid, end)  # SIGINT as a terminal sends it, and again, in haste
    if end == signal.SIGINT:
        time.sleep(0.05)
        os.killpg(process.pid, end)
    out, err = process.communicate(timeout=30)
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert not out and list(tmp_path.glob("train*")) == []
    if end == signal.SIGINT:
        assert process.returncode in (130, -signal.SIGINT) and "stopped" in err


# ---- the command, and what reads the result


@pytest.fixture(scope="module")
def curated(tmp_path_factory, tokenizer, benchmarks) -> tuple[subprocess.CompletedProcess, Path]:
    """`python -m prepare.curate` as a user calls it."""
    folder = tmp_path_factory.mktemp("curated")
    (folder / "math.jsonl").write_bytes(b"".join(map(to_line, many())))
    command = [sys.executable, "-m", "prepare.curate", "--input", folder / "math.jsonl"]
    command += ["--tokenizer", tokenizer, "--benchmarks_dir", benchmarks, "--num_examples", 400]
    command += ["--max_solution_tokens", 400, "--output", folder / "new" / "train.jsonl"]
    command = list(map(str, command))
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True), folder / "new"


def test_the_command_prints_a_table_and_fails_when_rows_are_missing(curated):
    result, folder = curated
    assert result.returncode == 1
    assert result.stderr.endswith(
        "error: only 300 of --num_examples 400 were found; they are written "
        "(--allow_fewer makes this a success)\n"
    )
    assert "100%" in result.stderr and "Traceback" not in result.stderr
    assert re.search(r"duplicate +103 ", result.stdout)
    names = ["train.jsonl", "train.png", "train.report.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_the_training_scripts_load_all_of_it(curated, tokenizer):
    examples = data.load_examples(str(curated[1] / "train.jsonl"))
    for tokens in (make_tokenizer(), data.load_tokenizer(str(tokenizer))):
        rows, dropped = data.tokenize_examples(examples, tokens, 1024, 400)
        assert len(rows) == len(examples) and not any(dropped.values())


# ---- real questions


@needs_shared
def test_real_questions_pass_and_those_of_benchmarks_do_not(curate):
    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (SHARED / "data" / f"{name}.jsonl").open()]

    aqua = rows("aqua_dev")
    sat = [
        {**each, "rationale": each["other"]["solution"], "correct": each["label"]}
        for each in rows("sat_math")
    ]
    asked = [each["problem"] for each in [*rows("aime24"), *rows("math500")]]
    asked += [each["question"] for each in rows("aime25")]
    options = {"options": ["(A) 1", "(B) 2", "(C) 3"], "rationale": "Guess.", "correct": "B"}
    leaked = [{"question": question, **options} for question in asked]
    real = {
        "tokenizer": str(SHARED / "qwen3_tokenizer"),
        "benchmarks_dir": SHARED / "data",
        "max_solution_tokens": 4096,
    }
    examples, report = curate(map(released, [*aqua, *sat, *leaked]), **real)
    assert report["rejected"] == dict.fromkeys(REASONS, 0) | {"benchmark_overlap": len(leaked)}
    assert len(examples) == len(aqua) + len(sat) == 474
    tokens = data.load_tokenizer(real["tokenizer"])
    tokenized, dropped = data.tokenize_examples(
        [data.Example(**example) for example in examples], tokens, 5120, 4096
    )
    assert len(tokenized) == len(examples) and not any(dropped.values())
    assert all(is_correct(example["solution"], example["answer"]) for example in examples)
