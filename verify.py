r"""What counts as right: one completion, one reference answer -> bool.

    is_correct(r"... so \boxed{\text{(C)}}", "C")    # True: letters are compared as letters
    is_correct(r"... so \boxed{\frac{1}{2}}", "0.5")  # True: everything else goes to Math-Verify

Completions are hostile input: `\boxed{9^{9^{9^{9}}}}` keeps a computer algebra system busy for
ever. So an answer that is huge, or would be when worked out, is right only if it is written exactly
like the reference. Everything else is graded in the processes of a `Verifier`, which have a
deadline and a memory limit: one that exceeds them is killed, and the answer counts as wrong.
"""

import contextlib
import json
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

CLOSING_CHARS = 300  # without a box, the answer has to be this close to the end
MAX_CHARS = 1000  # of an answer; what is longer is no answer
MAX_SIZE = 10_000  # digits, or terms, of an answer when worked out: no real one has nearly as many
ALGEBRA_S = 5  # Math-Verify's own limits: of parsing, of comparing
MEMORY_CAP = 2 * 2**30  # bytes of address space of one grading process
CHUNK = 8  # completions that a worker gets at a time, at most

MATH = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

BOX = r"\\(?:boxed|fbox)\s*\{"
BRACES = re.compile(rf"{BOX}|\\[{{}}]|\\\\(?!boxed|fbox)|[{{}}]")
FONTS = (
    r"\\(?:text|math)(?:bf|rm|it|sf|tt|normal|up)?\b|\\(?:mbox|boldsymbol|bm|bf|rm|operatorname)\b"
)
SPACES = r"\\[ ,;:!]|\\q?quad\b|~|\s"
LEAD = r"(?:(?:the\s+)?(?:correct\s+|final\s+)?(?:answer|option|choice)(?:\s+is)?[\s:]*)?"
ANOTHER_LABEL = r"[(\[][A-J][)\]]|(?:^|\s)[A-J][).:\]]"
AFTER_ANSWER = r"(?i:answer).{0,50}?\s([(\[*]*[A-J][)\]*]*)(?:[.,:\s}]|$)"  # "answer is **(C)**"


# ------------------------------------------------------------------------------------------------
# One completion


class Grade(NamedTuple):
    correct: bool
    extracted: str | None  # the answer that was read out of the completion, if there is one


def is_correct(completion: str, answer: str) -> bool:
    r"""Whether a model's completion arrives at the reference answer.

    The text after the last `</think>` is read (all of it if there is none). In it the last
    `\boxed{...}` counts; without a box, a closing "the answer is (C)" or "= 12". If the reference
    is a letter A-J, letters are compared; else Math-Verify compares values. Hostile input can take
    very long here: use a `Verifier` for text from a model.
    """
    return grade(completion, answer).correct


def grade(completion: str, answer: str) -> Grade:
    """Like `is_correct`, and which answer was read."""
    text = completion.rpartition("</think>")[2]
    closing, box = text[-CLOSING_CHARS:], last_box(text)
    written = None if box is None else box.strip()

    if reference := reference_letter(answer):
        letter = said_letter(closing) if box is None else read_letter(box)
        return Grade(letter == reference, letter or written or None)
    if written is not None and written == answer.strip():
        return Grade(True, written)
    said = closing if box is None else rf"\boxed{{{box}}}"
    if len(said) > MAX_CHARS:
        return Grade(False, written or None)
    # Math-Verify's own time limit is a signal, and only a main thread can receive signals.
    limit = ALGEBRA_S if threading.current_thread() is threading.main_thread() else None
    try:
        gold, parsed = _parse_reference(answer, limit), parse(said, MATH, parsing_timeout=limit)
        extracted = str(parsed[-1]) if box is None and parsed else written
        small = all(size(value) <= MAX_SIZE for value in (*gold, *parsed))
        return Grade(small and verify(gold, parsed, timeout_seconds=limit), extracted or None)
    except TimeoutException:  # derives from BaseException
        return Grade(False, None)


@lru_cache(maxsize=4096)
def _parse_reference(answer: str, limit: int | None) -> list:
    return parse(rf"\boxed{{{answer}}}", MATH, parsing_timeout=limit)


def size(value) -> float:
    """About how many digits, or terms, a parsed answer has when worked out; inf above MAX_SIZE.

    >>> size(parse("$2^{100}$")[0])
    30.102999566398122
    """
    if not isinstance(value, sympy.Basic):
        return 1  # text, or a matrix
    sizes = [size(part) for part in value.args]
    if value.is_Rational:
        worked_out = math.log10(max(abs(value.p), value.q, 2))
    elif isinstance(value, sympy.Pow | sympy.exp):
        base, exponent = value.as_base_exp()
        times, others = _amount(exponent), len(sympy.Add.make_args(base)) - 1
        terms = math.comb(round(times) + others, others) if times < math.inf else 1
        worked_out = max(size(base) * times, terms)  # (x + 1)^n has n + 1 terms
    elif isinstance(value, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.binomial):
        worked_out = sizes[0] * _amount(value.args[0])
    elif isinstance(value, sympy.Sum | sympy.Product):
        bounds = [bound for limit in value.limits for bound in limit[1:] if bound != sympy.oo]
        worked_out = max(1, sizes[0]) * math.prod(map(_amount, bounds))
    else:
        worked_out = sum(sizes) if isinstance(value, sympy.Mul) else max(sizes, default=1)
    return worked_out if worked_out <= MAX_SIZE else math.inf


def _amount(value: sympy.Basic) -> float:
    """About a number's absolute value, inf above MAX_SIZE; 1 for a symbol."""
    if not value.is_number:
        return 1
    digits = size(value)
    return 10**digits if digits <= math.log10(MAX_SIZE) else math.inf


# ------------------------------------------------------------------------------------------------
# Boxes and letters


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, or None. A box that is cut off is no box."""
    spans = boxes(text)
    return text[slice(*spans[-1])] if spans else None


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of complete `\boxed{...}` are in a text: (start, end), by start."""
    first = re.search(BOX, text)
    spans, unclosed = [], []  # of an unclosed brace: where the box's content starts, or None
    for brace in BRACES.finditer(text, first.start()) if first else ():
        match brace[0]:
            case "}":
                content = unclosed.pop() if unclosed else None
                if content is not None:
                    spans.append((content, brace.start()))
            case "{":
                unclosed.append(None)
            case r"\{" | r"\}" | r"\\":
                pass
            case _:
                unclosed.append(brace.end())
    return sorted(spans)


def reference_letter(answer: str) -> str | None:
    """The option letter that a reference answer is, however it is formatted, or None."""
    bare = re.sub(rf"{FONTS}|[(){{}}$.\s]", "", answer)
    return bare if re.fullmatch("[A-J]", bare) else None  # "e" and "i" are numbers


def said_letter(closing: str) -> str | None:
    """The letter that follows the last "answer" in a text without a box, or None."""
    said = re.findall(AFTER_ANSWER, closing)
    return read_letter(said[-1]) if said else None


def read_letter(text: str) -> str | None:
    r"""The one option letter A-J that `text`, the content of a box, names, or None.

    Reads `C`, `(C)`, `C.`, `\text{(C)}`, `\mathbf{C}`, `C) 12`, `Option C`, `12 (C)`. Two letters,
    or a letter that is part of algebra (`C^2`, `C = 12`, `AB`), name no option.
    """
    text = re.sub(FONTS, "", text)
    text = re.sub(r"\\(?:left|right|[()])|[{}$*]", "", re.sub(SPACES, " ", text)).strip()
    if re.fullmatch(r"[(\[]?[a-j][)\]]?[.:]?", text):
        text = text.upper()

    labelled = re.fullmatch(rf"(?i:{LEAD})(?:[(\[] ?([A-J]) ?[)\]]|([A-J]) ?[).:\]])(.*)", text)
    if labelled:  # its own punctuation sets the letter off from the option's text
        rest = labelled[3].strip()
        nothing_but_letters = re.fullmatch(r"(?:[A-J]\b|and|or|[\s,;/&])+", rest)
        if nothing_but_letters or re.search(ANOTHER_LABEL, rest):
            return None
        return labelled[1] or labelled[2]
    bare = re.fullmatch(rf"(?i:{LEAD})([A-J])(?: ?[,;] ?| (?![-+*/^_=<>|])|$)(.*)", text)
    if bare:
        return None if re.search(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])", bare[2]) else bare[1]
    trailing = re.fullmatch(r"([^A-J]*) [(\[]([A-J])[)\]]\.?", text)
    return trailing[2] if trailing else None


# ------------------------------------------------------------------------------------------------
# Many answers


class Verifier:
    """A pool of graders. Use as a context manager.

    Args:
        num_workers: processes that grade at the same time.
        timeout_s: seconds that one answer may take before it counts as wrong. Of 10,000 pairs of
            MATH-500's answers the slowest took 0.3 s, one in a thousand more than 0.1 s.
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 1.0):
        self.num_workers = num_workers
        self.timeout_s = timeout_s

    def __enter__(self) -> "Verifier":
        # Each worker is a fresh Python: it is not safe to fork a process with CUDA or threads, and
        # multiprocessing's spawn would import the caller's script (torch, vLLM, ...) again.
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s)]
        self.workers = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C in a terminal reaches only us, and we decide
            )
            for _ in range(self.num_workers)
        ]
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                worker.stdin.close()  # a worker ends with its input, so also if we are killed
        for worker in self.workers:
            worker.wait()

    def score(self, completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """Which completions are right, in the order of the inputs.

        Raises ValueError if the lengths differ, RuntimeError if a worker was lost.
        """
        return [graded.correct for graded in self.grade(completions, answers)]

    def grade(self, completions: Sequence[str], answers: Sequence[str]) -> list[Grade]:
        """Like `score`, and which answers were read. What takes too long is wrong, and not read."""
        pairs = list(zip(completions, answers, strict=True))
        grades: list[Grade | None] = [None] * len(pairs)
        starts: queue.SimpleQueue[int] = queue.SimpleQueue()
        chunk = max(1, min(CHUNK, len(pairs) // (4 * self.num_workers)))
        for start in range(0, len(pairs), chunk):
            starts.put(start)

        def drive(worker: subprocess.Popen) -> None:
            while True:
                try:
                    start = starts.get_nowait()
                except queue.Empty:
                    return
                try:
                    worker.stdin.write(json.dumps(pairs[start : start + chunk]) + "\n")
                    worker.stdin.flush()
                    graded = json.loads(worker.stdout.readline())
                except (OSError, ValueError):
                    return  # the worker has ended: its grades stay None, see below
                grades[start : start + chunk] = [Grade(*values) for values in graded]

        threads = [threading.Thread(target=drive, args=(worker,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in grades:
            raise RuntimeError("a verifier process ended unexpectedly (killed, or out of memory?)")
        return grades


def _serve(timeout_s: float) -> None:
    """A worker: grade chunks from stdin in a forked child, and replace a child that hangs or dies.

    The worker itself never reads a completion, so nothing that a model writes can stop it. It has
    loaded Math-Verify, so a new child is ready in milliseconds.
    """
    # A launcher may signal all processes; the trainer decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for answer in ("1", r"\frac{1}{2}", "0.5x", r"\left(3, \sqrt{2}\right)"):
        grade(f"so it is {answer}", "1")  # Math-Verify and sympy fill their caches at the first
        grade(rf"\boxed{{{answer}}}", "2")  # answers, and every child inherits them
    child = pipe = None
    for line in sys.stdin:
        pairs, grades = json.loads(line), []
        while len(grades) < len(pairs):
            if child is None:
                child, pipe = _fork_grader()
            with contextlib.suppress(EOFError, OSError):  # it died: out of memory, or a crash
                pipe.send(pairs[len(grades) :])
                while len(grades) < len(pairs) and pipe.poll(timeout_s):
                    grades.append(pipe.recv())
            if len(grades) < len(pairs):
                grades.append(Grade(False, None))
                child.kill()
                child.join()
                child = None
        print(json.dumps(grades), flush=True)
    if child is not None:
        child.kill()


def _fork_grader() -> tuple[multiprocessing.Process, multiprocessing.connection.Connection]:
    context = multiprocessing.get_context("fork")  # safe: this process has one thread, no CUDA
    ours, theirs = context.Pipe()
    child = context.Process(target=_grade, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    return child, ours


def _grade(pipe: multiprocessing.connection.Connection) -> None:
    logging.disable(logging.CRITICAL)  # Math-Verify warns about every answer that it cannot read
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_CAP, MEMORY_CAP))
    while True:
        for completion, answer in pipe.recv():
            try:
                graded = grade(completion, answer)
            except (MemoryError, RecursionError):
                graded = Grade(False, None)
            pipe.send(graded)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
