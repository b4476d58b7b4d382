"""Make the paper's training set out of AM-Qwen3-Distilled's math.jsonl (section 4.1).

    python -m prepare.curate --input math.jsonl --tokenizer Qwen/Qwen3-0.6B-Base

Keeps multiple-choice questions whose solution ends in the right letter and is short enough: each
question once, and none that a benchmark asks. From all that pass, `--num_examples` are drawn. The
draw depends on the seed and on the set of rows, not on their order or the number of workers: the
same call writes the same bytes. Rows are read as a stream; memory holds twice the examples that
are drawn, and a hash of every question that passes.
"""

import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from data import Example, InputError, read_rows, write_json, write_rows
from evaluate import BENCHMARKS, load_benchmark, read_benchmark
from launch import command_line
from models import load_tokenizer
from run import provenance
from verify import CLOSING_CHARS, FONTS, SPACES, boxes, read_letter, reference_letter, said_letter

import tyro
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

REASONS = (  # why a row is not kept, in the order of the checks
    "malformed",
    "not_source",
    "not_multiple_choice",
    "no_single_answer",
    "answer_mismatch",
    "verify_score",
    "too_long",
    "benchmark_overlap",
    "duplicate",
)
OVERLAP_WORDS = 13  # two questions that share a run of this many words count as the same
VERIFIED = 0.9  # the release's own bound: a lower verify_score means a wrong answer
BLOCK = 2**19  # bytes of rows that a worker gets at a time
MAX_ROW = 2**20  # bytes; a longer row is malformed
MAX_QUESTION = 20_000  # characters; a longer question is malformed
LABEL_STYLES = (  # how a question labels its options; it keeps to one style
    r"(?<![A-Za-z])[(\[（] ?([A-J]) ?[)\]）]",  # (A) [A]
    r"(?<![A-Za-z(\[])([A-J]) ?[).:．、：）](?![A-Z]\.)",  # A. A) A: but not "A.M."
)
SPELLINGS = (  # of an operator, in LaTeX and in Unicode
    (r"\\leq?(?:slant)?(?![A-Za-z])|⩽", "≤"),  # not the beginning of \left
    (r"\\geq?(?:slant)?(?![A-Za-z])|⩾", "≥"),
    (r"\\neq?(?![A-Za-z])", "≠"),
    (r"\\times(?![A-Za-z])", "×"),
    (r"\\cdot(?![A-Za-z])|·", "⋅"),
    (r"\\div(?![A-Za-z])", "÷"),
    (r"\\pm(?![A-Za-z])", "±"),
    (r"\\infty(?![A-Za-z])", "∞"),
    (r"\\(?:to|rightarrow)(?![A-Za-z])", "→"),
    (r"\^?\{?\\circ(?![A-Za-z])\}?|°|\\degree(?![A-Za-z])", " degrees "),
    (r"\\sqrt(?![A-Za-z])|√", " sqrt "),
    (r"\\pi(?![A-Za-z])|π", " pi "),
    (r"\\[lcd]?dots(?![A-Za-z])|…", " "),
    (r"\\[dtc]?frac(?![A-Za-z])\s*(\d)\s*(\d?)", r" frac \1 \2 "),  # \frac12
    (r"\\[dtc]?frac(?![A-Za-z])", " frac "),
    ("[⁰¹²³⁴-⁹⁻]+", lambda power: "^" + unicodedata.normalize("NFKC", power[0])),
)
ENCLOSING = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"), ("**", "**"))  # of a box


@dataclass(frozen=True)
class Args:
    input: tuple[Path, ...]  # the release's JSONL, one file or several
    tokenizer: str  # hub id or folder; counts tokens
    output: Path = Path("data/train.jsonl")  # next to it: train.report.json
    num_examples: int = 10_000  # to draw from all that pass
    max_solution_tokens: int = 4096  # of thinking and answer, end of turn included
    source: str = "numina"  # what the source of a row has to contain; case does not matter
    seed: int = 0  # of the draw
    benchmarks_dir: Path | None = None  # copies, <benchmark>.jsonl; default: the hub's
    skip_benchmark_check: bool = False  # also keep questions that a benchmark asks
    num_workers: int = len(os.sched_getaffinity(0))  # processes; default: one for each core


def curate(args: Args) -> None:
    """Sift all rows, draw from those that pass, write the training set and its report.

    Raises InputError or OSError if an argument or an input is bad, or if no row passes.
    """
    if args.output.resolve() in [path.resolve(strict=True) for path in args.input]:
        raise InputError(f"--output {args.output} would replace an input")
    tokenizer = load_tokenizer(args.tokenizer)
    benchmarks = {} if args.skip_benchmark_check else load_questions(args.benchmarks_dir)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # ---- sift and draw
    sifter, draw = Sifter(args, tokenizer, benchmarks), Draw(args.num_examples, args.seed)
    rejected, began = dict.fromkeys(REASONS, 0), time.monotonic()
    for verdict in sift_files(args.input, sifter, args.num_workers):
        if isinstance(verdict, str):
            rejected[verdict] += 1
        elif not draw.add(verdict):
            rejected["duplicate"] += 1
    seconds = time.monotonic() - began
    num_rows = sum(rejected.values()) + len(draw.seen)
    print(f"{num_rows:,} rows in {seconds:.1f} s with {args.num_workers} workers")
    for name, count in {**rejected, "questions that pass": len(draw.seen)}.items():
        print(f"    {name:<20}{count:>12,}{100 * count / max(1, num_rows):>8.2f} %")
    if not draw.seen:
        raise InputError("no row passes every rule; nothing was written")

    # ---- write
    examples = draw.examples()
    report = {
        "arguments": asdict(args),
        "rows": num_rows,
        "rejected": rejected,
        "questions_that_pass": len(draw.seen),
        "examples": len(examples),
        "benchmarks": {name: len(questions) for name, questions in benchmarks.items()},
        **provenance(),
    }
    write_rows([example.columns for example in examples], args.output)
    write_json(report, args.output.with_suffix(".report.json"))
    print(f"{len(examples):,} examples -> {args.output}")
    if len(examples) < args.num_examples:
        print(f"warning: --num_examples asks for {args.num_examples:,}", file=sys.stderr)


# ---- Reading files, and the workers --------------------------------------------------------------


def read_blocks(files: Sequence[Path]) -> Iterator[list[bytes]]:
    """Yield the lines of all files, about BLOCK bytes at a time."""
    for file in files:
        with file.open("rb") as lines:
            while block := lines.readlines(BLOCK):
                yield block


def sift_files(
    files: Sequence[Path], sifter: "Sifter", num_workers: int
) -> Iterator[Example | str]:
    """Yield what the sifter makes of each row, in order.

    Only twice `num_workers` blocks of rows wait in memory, however large the input is.
    """
    context = multiprocessing.get_context("fork")  # workers share the sifter's memory
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (sifter,))
    total = sum(file.stat().st_size for file in files)
    bar = tqdm(desc="curate", total=total, unit="B", unit_scale=True, dynamic_ncols=True)
    pending = deque()
    with pool, bar:
        for block in read_blocks(files):
            bar.update(sum(map(len, block)))
            pending.append(pool.submit(_sift, block))
            if len(pending) > 2 * num_workers:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()


def _start_worker(sifter: "Sifter") -> None:
    global _SIFTER
    _SIFTER = sifter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends the workers


def _sift(lines: list[bytes]) -> list[Example | str]:
    return [_SIFTER.sift(line) for line in lines if not line.isspace()]


# ---- Reading a row -------------------------------------------------------------------------------


class ReleaseRow(NamedTuple):
    source: str  # "unknown" if the row does not say
    question: str
    thinking: str
    answer: str  # what follows the thinking
    reference: str  # "" if the row has none
    verify_score: object


def read_release_row(line: bytes) -> ReleaseRow | None:
    """Read one row of AM-Qwen3-Distilled; None if question, thinking or answer cannot be read.

    Its fields vary from row to row: any of them may be missing, null or of another type.
    """
    if len(line) > MAX_ROW:
        return None
    try:
        turns = json.loads(line)["conversations"]
        [human] = [turn for turn in turns if turn["from"] in ("human", "user")]
        [assistant] = [turn for turn in turns if turn["from"] in ("assistant", "gpt")]
        info = {}
        for turn in (assistant, human):
            if isinstance(more := turn.get("info"), dict):
                info |= {name: value for name, value in more.items() if value is not None}
        question = human["value"].strip()
        thinking, answer = split_answer(assistant.get("value"), info)
        texts = {name: value for name, value in info.items() if isinstance(value, str)}
        source, reference = texts.get("source", ""), texts.get("ground_truth", "")
        f"{question}{thinking}{answer}{source}".encode()  # raises at half a surrogate pair
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    if not (question and thinking and answer) or len(question) > MAX_QUESTION:
        return None
    if re.search("</?think>", thinking + answer) or re.search("</?answer>", answer):
        return None
    if re.search(r"<\|\w+\|>", f"{question} {thinking} {answer}"):
        return None  # would be read as a special token, e.g. an end of turn
    source = source.strip() or "unknown"
    return ReleaseRow(source, question, thinking, answer, reference, info.get("verify_score"))


def split_answer(text: object, info: dict) -> tuple[str, str]:
    """Thinking and answer of an assistant's text, without their tags.

    If the text lacks one of them, both are those of `info`; KeyError if it lacks them as well.
    """
    thinking, _, answer = (text if isinstance(text, str) else "").rpartition("</think>")
    thinking = thinking.strip().removeprefix("<think>").strip()
    answer = answer.strip().removeprefix("<answer>").removesuffix("</answer>").strip()
    if thinking and answer:
        return thinking, answer
    return info["think_content"].strip(), info["answer_content"].strip()


# ---- The rules -----------------------------------------------------------------------------------


class Sifter:
    """The rules for single rows; `Draw` keeps each question once."""

    def __init__(self, args: Args, tokenizer: PreTrainedTokenizerBase, benchmarks: dict):
        self.source = args.source.casefold()
        self.max_solution_tokens = args.max_solution_tokens
        self.tokenizer = tokenizer
        problems = [normalize(question) for name in benchmarks for question in benchmarks[name]]
        self.problems = frozenset(problems)
        self.option_prefixes = tuple(f"{problem} a " for problem in problems)
        self.runs = frozenset(run for problem in problems for run in word_runs(problem))
        self.short = [f" {problem} " for problem in problems if not any(word_runs(problem))]

    def sift(self, line: bytes) -> Example | str:
        """A row as an example, or the first reason not to keep it."""
        row = read_release_row(line)
        if row is None:
            return "malformed"
        if self.source not in row.source.casefold():
            return "not_source"
        letter = reference_letter(row.reference)
        if letter is None or letter not in option_labels(row.question):
            return "not_multiple_choice"
        final = final_letter(row.answer)
        if final is None:
            return "no_single_answer"
        if final != letter:
            return "answer_mismatch"
        if says_wrong(row.verify_score):
            return "verify_score"
        solution = f"<think>\n{row.thinking}\n</think>\n\n{end_in_box(row.answer, letter)}"
        ids = self.tokenizer(solution, add_special_tokens=False, verbose=False).input_ids
        if len(ids) + 1 > self.max_solution_tokens:  # the end of turn is one more
            return "too_long"
        normalized = normalize(row.question)
        if self.overlaps(normalized):
            return "benchmark_overlap"
        return Example(f"am-{digest(normalized)[:16]}", row.question, solution, letter, row.source)

    def overlaps(self, normalized: str) -> bool:
        """Whether a benchmark asks a question, with or without options, or shares a word run.

        A problem that is too short for a run is looked for as a whole.
        """
        return (
            normalized in self.problems
            or any(problem in f" {normalized} " for problem in self.short)
            or normalized.startswith(self.option_prefixes)
            or any(run in self.runs for run in word_runs(normalized))
        )


def says_wrong(verify_score: object) -> bool:
    """Whether a score of any type is too low; one that is no number is not."""
    try:
        return float(verify_score) < VERIFIED
    except (OverflowError, TypeError, ValueError):
        return False


def normalize(question: str) -> str:
    """Words, numbers and operators, in lower case and one spelling; no layout, no brackets."""
    layout = rf"{FONTS}|{SPACES}|\\(?:left|right|displaystyle)\b"
    text = re.sub(layout, " ", question)
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
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
    questions = {}
    for name, benchmark in BENCHMARKS.items():
        problems = []
        if benchmarks_dir is None:
            problems = load_benchmark(name)
        elif (path := benchmarks_dir / f"{name}.jsonl").is_file():
            problems = read_benchmark(name, read_rows(str(path)))
        # Without options: GPQA-Diamond's are added by us, in an order of our own.
        questions[name] = [problem.question.partition("\n\n(A) ")[0] for problem in problems]
        if len(problems) < benchmark.num_problems:
            found = f"only {len(problems)} of {benchmark.num_problems} problems are checked for"
            print(f"warning: {name}: {found}", file=sys.stderr)
    if not any(questions.values()):
        raise InputError(f"{benchmarks_dir}: has no benchmark, such as {name}.jsonl")
    return questions


# ---- Option letters: what a box names is decided in verify.py, as for training -------------------


def option_labels(question: str) -> str:
    r"""The labels of a question's options, e.g. "ABCDE", or "" if it has fewer than two.

    Reads `(A)`, `A.`, `A)`, `A:`, `\textbf{(A)}` and the like, in one style and in order from A.
    """
    text = re.sub(rf"{SPACES}|\\[hv]space\*?{{[^{{}}]*}}|\\\\", " ", question)
    text = re.sub(rf"{FONTS}|\\left|\\right|[{{}}$*]", "", text)
    longest = ""
    for style in LABEL_STYLES:
        labels = ""
        for letter in re.findall(style, text):
            if letter == "ABCDEFGHIJ"[len(labels) :][:1]:  # not the next one: part of the text
                labels += letter
        longest = max(longest, labels, key=len)
    return longest if len(longest) > 1 else ""


def final_letter(text: str) -> str | None:
    """The one option letter that a text ends in, or None if it ends in none or names several."""
    letters = [
        read_letter(text[start:end]) if end - start < CLOSING_CHARS else None
        for start, end in boxes(text)
    ]
    if letters:
        return letters[-1] if set(letters) <= {letters[-1], None} else None
    return said_letter(text[-CLOSING_CHARS:])


def end_in_box(text: str, letter: str) -> str:
    r"""The text with a plain `\boxed{C}` as its end.

    If the text already ends in a box, the plain one replaces it, together with the dollars or
    stars around it. Otherwise the plain one is appended.
    """
    plain = rf"\boxed{{{letter}}}"
    if spans := boxes(text):
        start, end = spans[-1]
        before, after = text[: text.rindex("\\", 0, start)], text[end + 1 :].strip(" \n.")
        for opening, closing in ENCLOSING:
            if before.rstrip().endswith(opening) and after.startswith(closing):
                before = before.rstrip().removesuffix(opening)
                after = after.removeprefix(closing).strip(" \n.")
        if not after:
            return before + plain
    return f"{text}\n\n{plain}"


# ---- The draw ------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    """A hash that is the same on every machine."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


class Draw:
    """Draws examples, each question once, whatever their order.

    A seeded hash of the question is its place, and the smallest places are drawn. Of examples with
    the same question, the one with the smallest hash is taken.
    """

    def __init__(self, num_examples: int, seed: int):
        self.num_examples, self.seed = num_examples, seed
        self.seen: set[str] = set()  # ids, which are hashes of questions
        self.drawn: dict[str, Example] = {}  # by place; up to twice num_examples

    def add(self, example: Example) -> bool:
        """Add an example; returns whether its question is new."""
        place, is_new = digest(self.seed, example.id), example.id not in self.seen
        if is_new:
            self.seen.add(example.id)
            self.drawn[place] = example
        elif place in self.drawn:
            pair = self.drawn[place], example
            self.drawn[place] = min(pair, key=lambda each: digest(*each.columns.values()))
        if len(self.drawn) > 2 * self.num_examples:
            self.drawn = dict(sorted(self.drawn.items())[: self.num_examples])
        return is_new

    def examples(self) -> list[Example]:
        return [self.drawn[place] for place in sorted(self.drawn)[: self.num_examples]]


if __name__ == "__main__":
    with command_line():
        cli = {"prog": "python -m prepare.curate", "description": __doc__, "use_underscores": True}
        curate(tyro.cli(Args, **cli))
