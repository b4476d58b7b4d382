"""Make the paper's training set out of AM-Qwen3-Distilled's math.jsonl (section 4.1).

    python -m prepare.curate --input math.jsonl --tokenizer Qwen/Qwen3-0.6B-Base

Keeps multiple-choice questions whose solution ends in the right letter and is short enough: each
question once, and none that a benchmark asks. From all that pass, `--num_examples` are drawn. The
draw depends on the seed and the set of rows alone: not on their order, nor on the number of
workers. The same call writes the same bytes.

It also writes train.report.json (what was read, kept and rejected) and train.png.
Rows are read as a stream. Memory holds the drawn examples, and a hash of every other question.
"""

import ctypes
import hashlib
import heapq
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data import (
    Example,
    InputError,
    atomic_write,
    load_tokenizer,
    read_rows,
    write_json,
    write_rows,
)
from evaluate import BENCHMARKS, load_benchmark, read_benchmark
from prepare.letters import end_in_box, final_letter, option_labels
from prepare.look import length_summary
from run import provenance
from verify import FONTS, SPACES, reference_letter

REASONS = (  # why a row is not kept; of several, the first one counts
    "malformed",  # its question, thinking or answer cannot be read
    "not_source",  # its source does not contain --source
    "not_multiple_choice",  # its reference is no letter, or not the label of an option
    "no_single_answer",  # its answer does not end in exactly one letter
    "answer_mismatch",  # that letter is not the reference
    "verify_score",  # it has a score, and that is below VERIFIED
    "too_long",  # thinking and answer take more than --max_solution_tokens
    "duplicate",  # another row asks the same
    "benchmark_overlap",  # a benchmark asks the same, or shares a run of OVERLAP_WORDS words
)
OVERLAP_WORDS = 13  # two questions that share a run of this many words count as the same
VERIFIED = 0.9  # the release's own bound: a lower verify_score means a wrong answer
BLOCK = 2**19  # bytes of rows that a worker gets at a time
MAX_ROW = 2**20  # bytes; a longer row is malformed, which bounds memory
MAX_QUESTION = 20_000  # characters; a longer question is malformed, which bounds time
PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal that a process gets when its parent dies


@dataclass(frozen=True)
class Args:
    input: tuple[Path, ...]  # the release's JSONL, one file or several, also as .gz and .zst
    tokenizer: str  # hub id or folder; counts tokens
    output: Path = Path("data/train.jsonl")  # next to it: train.report.json and train.png
    num_examples: int = 10_000  # to draw from all that pass
    max_solution_tokens: int = 4096  # of thinking and answer, end of turn included
    source: str = "numina"  # what the source of a row has to contain; case does not matter
    seed: int = 0  # of the draw
    benchmarks_dir: Path | None = None  # copies, <benchmark>.jsonl; default: the hub's
    skip_benchmark_check: bool = False  # also keep questions that a benchmark asks
    allow_fewer: bool = False  # finding fewer than num_examples is no failure
    num_workers: int = len(os.sched_getaffinity(0))  # processes; default: one for each core

    def check(self) -> None:
        """Raise InputError for what cannot work, before anything is read."""
        for name in ("num_examples", "max_solution_tokens", "num_workers"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.input:
            raise InputError("--input needs at least one file")
        for path in self.input:
            if not path.is_file():
                raise InputError(f"{path}: no such file")
        if self.output.suffix != ".jsonl" or self.output.is_dir():
            raise InputError(f"--output {self.output}: must be a file that ends in .jsonl")
        if self.output.resolve() in [path.resolve() for path in self.input]:
            raise InputError(f"--output {self.output} would replace an input")


def curate(args: Args) -> None:
    """Sift all rows, draw from those that pass, write the training set and its report.

    Raises InputError if an argument or an input is bad, or if too few rows pass.
    """
    args.check()
    tokenizer = load_tokenizer(args.tokenizer)
    benchmarks = {} if args.skip_benchmark_check else load_questions(args.benchmarks_dir)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(args.output.parent, os.W_OK):
        raise InputError(f"{args.output.parent}: no permission to write there")

    # ---- sift and draw
    files = [HashedFile(path) for path in args.input]
    began = time.monotonic()
    sifter = Sifter(args, tokenizer, benchmarks)
    draw = Draw(args.num_examples, args.seed)
    rejected = sift_files(files, sifter, draw, args.num_workers)
    seconds = time.monotonic() - began
    examples, num_tokens = draw.examples()

    # ---- report
    report = {
        "arguments": asdict(args),
        "inputs": [
            {"path": file.name, "bytes": file.num_bytes, "sha256": file.sha256.hexdigest()}
            for file in files
        ],
        **count_rows(rejected + draw.outcomes(), examples),
        "benchmarks": {name: len(questions) for name, questions in benchmarks.items()},
        **provenance(),
    }
    rows, num_bytes = report["rows"], sum(file.num_bytes for file in files)
    print(
        f"{rows:,} rows in {seconds:.1f} s with {args.num_workers} workers: "
        f"{rows / seconds:,.0f} rows/s, {num_bytes / seconds / 1e6:.1f} MB/s"
    )
    table = {**report["rejected"], "questions that pass": report["questions_that_pass"]}
    for name, count in table.items():
        print(f"    {name:<20}{count:>12,}{100 * count / max(1, rows):>8.2f} %")
    if table["malformed"] == rows:
        raise InputError("no row can be read: is it the release's JSONL? Nothing was written")
    if not examples:
        raise InputError("no row passes every rule; nothing was written")

    # ---- write
    write_rows([example.columns for example in examples], args.output)
    report["solution_tokens"] = length_summary(num_tokens)
    report["output_sha256"] = hashlib.sha256(args.output.read_bytes()).hexdigest()
    write_json(report, args.output.with_suffix(".report.json"))
    draw_figure(examples, num_tokens, args.output.with_suffix(".png"))
    print(f"{len(examples):,} examples -> {args.output}")
    if len(examples) < args.num_examples and not args.allow_fewer:
        raise InputError(
            f"only {len(examples):,} of --num_examples {args.num_examples:,} were found; they are "
            "written (--allow_fewer makes this a success)"
        )


# ------------------------------------------------------------------------------------------------
# Reading files, and the workers


class HashedFile(io.FileIO):
    """A file that counts and hashes the bytes that are read from it."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.num_bytes, self.sha256 = 0, hashlib.sha256()

    def readinto(self, buffer: memoryview) -> int:
        size = super().readinto(buffer)
        self.num_bytes += size
        self.sha256.update(memoryview(buffer)[:size])
        return size


def read_blocks(file: HashedFile) -> Iterator[list[bytes]]:
    """Yield the lines of a file, about BLOCK bytes at a time. Reads .gz and .zst, too.

    Raises InputError if an archive is damaged, or ends too early.
    """
    codec = {".gz": "gzip", ".zst": "zstd"}.get(Path(file.name).suffix)
    stream = io.BufferedReader(file, 2**20)
    try:
        if codec:
            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), codec)
            stream = io.BufferedReader(unpacked, 2**20)
        block, size = [], 0
        while line := stream.readline(MAX_ROW):
            if len(line) == MAX_ROW and not line.endswith(b"\n"):
                while (rest := stream.readline(MAX_ROW)) and not rest.endswith(b"\n"):
                    pass  # drop the rest: what is left of the row cannot be parsed
            if not line.isspace():
                block.append(line)
                size += len(line)
            if size >= BLOCK:
                yield block
                block, size = [], 0
        yield block
    except OSError as error:
        raise InputError(f"{file.name}: cannot be read: {error}") from error


def submit_blocks(
    files: Sequence[HashedFile], pool: ProcessPoolExecutor, ahead: int
) -> Iterator[tuple[int, Future]]:
    """Yield (bytes read so far, future of its result) for each block of all files, in order.

    At most `ahead` blocks wait in memory, however large the input is.
    """
    pending = deque()
    for file in files:
        for block in read_blocks(file):
            position = sum(file.num_bytes for file in files)
            pending.append((position, pool.submit(_sift, block)))
            if len(pending) > ahead:
                yield pending.popleft()
    yield from pending


def sift_files(
    files: Sequence[HashedFile], sifter: "Sifter", draw: "Draw", num_workers: int
) -> Counter:
    """Add every row that passes to the draw; returns how many do not, by (source, reason)."""
    rejected = Counter()
    context = multiprocessing.get_context("fork")  # workers share the sifter's memory
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (sifter,))
    total = sum(os.stat(file.name).st_size for file in files)
    bar = tqdm(desc="curate", total=total, unit="B", unit_scale=True, dynamic_ncols=True)
    try:
        for position, future in submit_blocks(files, pool, ahead=2 * num_workers):
            reasons, candidates = future.result()
            rejected += reasons
            for candidate in candidates:
                draw.add(candidate)
            bar.set_postfix_str(f"{len(draw.questions):,} questions", refresh=False)
            bar.update(position - bar.n)
    except BrokenProcessPool as error:
        raise InputError("a worker was killed (out of memory?); nothing was written") from error
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)
    return rejected


def _start_worker(sifter: "Sifter") -> None:
    global _SIFTER
    _SIFTER = sifter
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _sift(lines: list[bytes]) -> tuple[Counter, list["Candidate"]]:
    return _SIFTER(lines)


# ------------------------------------------------------------------------------------------------
# Reading a row


class ReleaseRow(NamedTuple):
    source: str  # "unknown" if the row does not say
    question: str
    thinking: str
    answer: str  # what follows the thinking
    letter: str | None  # the reference, if it is a letter
    verify_score: object


def read_release_row(line: bytes) -> ReleaseRow | None:
    """Read one row of AM-Qwen3-Distilled; None if question, thinking or answer cannot be read.

    Its fields vary from row to row: any of them may be missing, null or of another type.
    """
    try:
        turns = json.loads(line)["conversations"]
        [human] = [turn for turn in turns if turn["from"] in ("human", "user")]
        [assistant] = [turn for turn in turns if turn["from"] in ("assistant", "gpt")]
        info = {}
        for turn in (assistant, human):
            if isinstance(more := turn.get("info"), dict):
                info |= {name: value for name, value in more.items() if value is not None}
        text = assistant.get("value")
        thinking, answer = split_answer(text if isinstance(text, str) else "", info)
        question = human["value"].strip()
        source, reference = (
            value if isinstance(value := info.get(name), str) else ""
            for name in ("source", "ground_truth")
        )
        f"{question}{thinking}{answer}{source}".encode()  # raises at half a surrogate pair
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    if not (question and thinking and answer) or len(question) > MAX_QUESTION:
        return None
    if re.search("</?think>", thinking + answer) or re.search("</?answer>", answer):
        return None
    if re.search(r"<\|\w+\|>", f"{question} {thinking} {answer}"):
        return None  # would be read as a special token, e.g. an end of turn
    source, letter = source.strip() or "unknown", reference_letter(reference)
    return ReleaseRow(source, question, thinking, answer, letter, info.get("verify_score"))


def split_answer(text: str, info: dict) -> tuple[str, str]:
    """Thinking and answer of an assistant's text, without their tags.

    `info` may hold them too, as `think_content` and `answer_content`. It is used for what the
    text lacks; KeyError if it lacks it as well.
    """
    thinking, tag, answer = text.rpartition("</think>")
    if not tag:
        thinking, tag, answer = text.partition("<answer>")
    if not tag:
        thinking, answer = "", info.get("answer_content", text)
    thinking = thinking.strip().removeprefix("<think>").strip()
    answer = answer.strip().removeprefix("<answer>").removesuffix("</answer>").strip()
    return thinking or info["think_content"].strip(), answer or info["answer_content"].strip()


# ------------------------------------------------------------------------------------------------
# The rules


class Candidate(NamedTuple):
    """A row that passed every rule for single rows."""

    example: Example
    normalized: str  # the question, see `normalize`
    num_tokens: int  # of the solution, end of turn included
    overlaps: bool  # with a problem of a benchmark


class Sifter:
    """The rules for single rows, and the comparison with the benchmarks' questions.

    Called with lines of the release, it returns how many it rejected, by (source, reason), and
    the candidates, in order.
    """

    def __init__(self, args: Args, tokenizer: PreTrainedTokenizerBase, benchmarks: dict):
        self.source = args.source.casefold()
        self.max_solution_tokens = args.max_solution_tokens
        self.tokenizer = tokenizer
        problems = [normalize(question) for name in benchmarks for question in benchmarks[name]]
        self.problems = frozenset(problems)
        self.option_prefixes = tuple(f"{problem} a " for problem in problems)
        self.runs = frozenset(run for problem in problems for run in word_runs(problem))

    def __call__(self, lines: Sequence[bytes]) -> tuple[Counter, list[Candidate]]:
        rejected, rows, solutions, candidates = Counter(), [], [], []
        for line in lines:
            row = read_release_row(line)
            if row is None:
                rejected["unknown", "malformed"] += 1
            elif reason := self.objection(row):
                rejected[row.source, reason] += 1
            else:
                rows.append(row)
                answer = end_in_box(row.answer, row.letter)
                solutions.append(f"<think>\n{row.thinking}\n</think>\n\n{answer}")
        if not rows:
            return rejected, []
        ids = self.tokenizer(solutions, add_special_tokens=False, verbose=False).input_ids
        for row, solution, tokens in zip(rows, solutions, ids, strict=True):
            num_tokens = len(tokens) + 1  # the end of turn
            if num_tokens > self.max_solution_tokens:
                rejected[row.source, "too_long"] += 1
                continue
            normalized = normalize(row.question)
            id = "am-" + hashlib.sha256(normalized.encode()).hexdigest()[:16]
            example = Example(id, row.question, solution, row.letter, row.source)
            overlaps = self.overlaps(normalized)
            candidates.append(Candidate(example, normalized, num_tokens, overlaps))
        return rejected, candidates

    def objection(self, row: ReleaseRow) -> str | None:
        """The first reason not to keep a row; its length is looked at later."""
        if self.source not in row.source.casefold():
            return "not_source"
        if row.letter is None or row.letter not in option_labels(row.question):
            return "not_multiple_choice"
        final = final_letter(row.answer)
        if final is None:
            return "no_single_answer"
        if final != row.letter:
            return "answer_mismatch"
        return "verify_score" if says_wrong(row.verify_score) else None

    def overlaps(self, normalized: str) -> bool:
        """Whether a benchmark asks a question, with or without options, or shares a word run."""
        return (
            normalized in self.problems
            or normalized.startswith(self.option_prefixes)
            or any(run in self.runs for run in word_runs(normalized))
        )


def says_wrong(verify_score: object) -> bool:
    """Whether a score of any type means a wrong answer; one that cannot be read does not."""
    try:
        return float(verify_score) < VERIFIED
    except (OverflowError, TypeError, ValueError):
        return str(verify_score).strip().casefold() in ("false", "wrong", "incorrect")


def normalize(question: str) -> str:
    """Words, numbers and operators, in lower case: no fonts, layout, brackets or punctuation."""
    layout = rf"{FONTS}|{SPACES}|\\(?:left|right|displaystyle)\b"
    text = re.sub(layout, " ", question)
    text = re.sub(r"\\[dtc]?frac(?![A-Za-z])", " frac ", text)
    text = unicodedata.normalize("NFKC", text).casefold()
    text = text.translate(str.maketrans("\u2212\u2019", "-'"))  # minus sign, apostrophe
    return " ".join(
        token
        for token in re.findall(r"[^\W_]+|\S", text)
        if token[0].isalnum() or token in "-*/^!%'" or unicodedata.category(token) == "Sm"
    )


def word_runs(normalized: str) -> Iterator[str]:
    """Every run of OVERLAP_WORDS words or numbers of a normalized question, operators left out."""
    words = [word for word in normalized.split() if word[0].isalnum()]
    for start in range(len(words) - OVERLAP_WORDS + 1):
        yield " ".join(words[start : start + OVERLAP_WORDS])


def load_questions(benchmarks_dir: Path | None) -> dict[str, list[str]]:
    """The questions of the seven benchmarks, from the hub or from the copies in a folder."""
    questions, missing = {}, []
    for name, benchmark in BENCHMARKS.items():
        problems = []
        if benchmarks_dir is None:
            problems = load_benchmark(name, option="--benchmarks_dir")
        elif (path := benchmarks_dir / f"{name}.jsonl").is_file():
            problems = read_benchmark(name, list(read_rows(str(path))))
        # Without options: GPQA-Diamond's are added by us, in an order of our own.
        questions[name] = [problem.question.partition("\n\n(A) ")[0] for problem in problems]
        if lacking := benchmark.num_problems - len(problems):
            missing.append(f"{name} {lacking} of {benchmark.num_problems}")
    if missing:
        print(f"warning: benchmark problems not checked for: {', '.join(missing)}", file=sys.stderr)
    if not any(questions.values()):
        raise InputError(
            f"{benchmarks_dir}: has none of {', '.join(f'{n}.jsonl' for n in BENCHMARKS)}"
        )
    return questions


# ------------------------------------------------------------------------------------------------
# The draw


class Draw:
    """Draws candidates, each question once, whatever their order.

    A seeded hash of a question is its place, and the smallest places are drawn. Of rows with the
    same question, the one with the smallest hash is taken.
    """

    def __init__(self, num_examples: int, seed: int):
        self.num_examples, self.seed = num_examples, seed
        self.duplicates = Counter()  # by source
        self.questions: dict[bytes, tuple[bytes, str, bool]] = {}  # place -> hash, source, overlaps
        self.drawn: dict[bytes, Candidate] = {}  # by place; up to twice num_examples

    def add(self, candidate: Candidate) -> None:
        example, source = candidate.example, sys.intern(candidate.example.source)
        place = hashlib.sha256(f"{self.seed}/{candidate.normalized}".encode()).digest()
        own = hashlib.sha256("\0".join(example.columns.values()).encode()).digest()
        if place in self.questions:
            other, other_source, _ = self.questions[place]
            self.duplicates[source if other <= own else other_source] += 1
            if other <= own:
                return
        self.questions[place] = own, source, candidate.overlaps
        if not candidate.overlaps:
            self.drawn[place] = candidate
        if len(self.drawn) > 2 * self.num_examples:
            self.drawn = dict(heapq.nsmallest(self.num_examples, self.drawn.items()))

    def examples(self) -> tuple[list[Example], list[int]]:
        """The examples that are drawn, and the tokens of their solutions."""
        drawn = [self.drawn[place] for place in sorted(self.drawn)[: self.num_examples]]
        return [each.example for each in drawn], [each.num_tokens for each in drawn]

    def outcomes(self) -> Counter:
        """All candidates by (source, outcome): a reason, or "questions_that_pass"."""
        counts = Counter({(source, "duplicate"): n for source, n in self.duplicates.items()})
        for _, source, overlaps in self.questions.values():
            counts[source, "benchmark_overlap" if overlaps else "questions_that_pass"] += 1
        return counts


# ------------------------------------------------------------------------------------------------
# The report


def count_rows(outcomes: Counter, examples: Sequence[Example]) -> dict:
    """The report's counts, from rows by (source, outcome) and the examples that were drawn."""
    drawn, total = Counter(example.source for example in examples), Counter()
    for (_, outcome), count in outcomes.items():
        total[outcome] += count
    return {
        "rows": total.total(),
        "rejected": {reason: total[reason] for reason in REASONS},
        "questions_that_pass": total["questions_that_pass"],
        "examples": len(examples),
        "sources": {
            source: {name: outcomes[source, name] for name in (*REASONS, "questions_that_pass")}
            | {"examples": drawn[source]}
            for source in sorted({source for source, _ in outcomes})
        },
        "answers": dict(sorted(Counter(example.answer for example in examples).items())),
    }


def draw_figure(examples: Sequence[Example], num_tokens: list[int], path: Path) -> None:
    """Draw the solutions' lengths and the letters' counts, as PNG."""
    figure = Figure(figsize=(7, 2.8), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    left.hist(num_tokens, bins=np.linspace(0, max(num_tokens), 33))
    median = np.median(num_tokens)
    left.axvline(median, color="black", linestyle="--", linewidth=1)
    left.set(xlabel=f"tokens of a solution (median {median:,.0f})", ylabel="examples")
    answers = Counter(example.answer for example in examples)
    right.bar(*zip(*sorted(answers.items()), strict=True))
    right.set(xlabel="right answer", ylabel="examples")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png")


if __name__ == "__main__":
    try:
        curate(
            tyro.cli(
                Args, prog="python -m prepare.curate", description=__doc__, use_underscores=True
            )
        )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        os._exit(130)  # at once: an orderly exit waits for workers, which end with us anyway
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
