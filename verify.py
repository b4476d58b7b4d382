r"""What counts as right: one completion, one reference answer -> bool.

    is_correct(r"... so \boxed{\text{(C)}}", "C")    # True: letters are compared as letters
    is_correct(r"... so \boxed{\frac{1}{2}}", "0.5")  # True: everything else goes to Math-Verify

Completions are hostile input: `\boxed{9^{9^{9^{9}}}}` keeps a computer algebra system busy forever.
So a `Verifier` grades in worker processes with a limit on CPU time and memory. An answer that
exceeds one kills its worker: it counts as wrong, and a new worker takes over. docs/verdicts.md has
the rules, and how to use a reward function of your own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import os
import queue
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

CLOSING_CHARS = 300  # without a box, the answer must be in the last 300 characters
MAX_CHARS = 1000  # a longer answer is wrong
HUGE = re.compile(  # 9^{9^9} | x^{99999} | 99999! | (10^9)! | ((5!)!)!: no worker dies of it
    r"(?:\^|\\binom)[{( ]*-?\d+\^|\^[{( ]*-?\d{5}|\d{5}[)} ]*!|\^[{( ]*\d+[} ]*\)!|!\)+!"
)
ALGEBRA_S = 5  # limit for parsing, and for comparing, outside a Verifier
TIMEOUT_S = 0.8  # CPU time of one answer
REWARD_TIMEOUT_S = 10.0  # CPU time of one call of a reward function
WAITING_S = 60  # extra time by the clock: for a core on a loaded host, a subprocess, a file
MEMORY_CAP = 2 * 2**30  # bytes of address space of one worker


class RewardError(ValueError):
    """A reward function cannot be loaded, fails, or returns no number in [0, 1]."""


def as_text(value: str | float) -> str:
    """A reference as text; a number is written out: 27.0 as 27, 5e-05 as 0.00005.

    Raises TypeError for anything else, and for a number that is not finite.
    """
    if isinstance(value, str):
        return value
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"a reference must be text or a number, got {value!r:.80}")
    return str(int(value)) if value == int(value) else f"{Decimal(repr(value)):f}"


class Grade(NamedTuple):
    correct: bool | float  # a number in [0, 1] if a reward function gave it
    extracted: str | None  # the answer that was read out of the completion


Reference = str | dict  # the right answer; for a reward function, the example's row


# ------------------------------------------------------------------------------------------------
# One completion


def is_correct(completion: str, answer: str) -> bool:
    r"""Whether a model's completion arrives at the reference answer.

    Reads the text after the last `</think>` (all of it if there is none): its last `\boxed{...}`,
    or without a box a closing "the answer is (C)" or "= 12". If the reference is a letter A-J,
    letters are compared; else Math-Verify compares values. Hostile input can take very long here:
    use a `Verifier` for text from a model.
    """
    # Math-Verify's time limit is a signal, which only a main thread can receive.
    in_main = threading.current_thread() is threading.main_thread()
    return grade(completion, answer, ALGEBRA_S if in_main else None).correct


def grade(completion: str, answer: str, limit_s: int | None = None) -> Grade:
    """Like `is_correct`, and which answer was read. Parsing, and comparing, may take `limit_s`."""
    answer = as_text(answer).strip()
    read = extract(completion, answer)
    if letter := reference_letter(answer):
        return Grade(read == letter, read)
    if read == answer:
        return Grade(True, read)
    said = completion.rpartition("</think>")[2][-CLOSING_CHARS:]
    if read is not None:
        said = rf"\boxed{{{read}}}"
    if len(said) > MAX_CHARS or HUGE.search(said):
        return Grade(False, read)
    from math_verify import verify

    gold, parsed = (parse_values(text, limit_s) for text in (rf"\boxed{{{answer}}}", said))
    shown = str(parsed[-1]) if read is None and parsed else read
    return Grade(verify(gold, parsed, timeout_seconds=limit_s), shown)


def extract(completion: str, answer: str) -> str | None:
    """The answer that a completion gives, read without algebra, so fast on any text.

    The last box; if the reference is a letter, the letter in it or in the closing. None if there
    is neither: `grade` then looks for a value in the closing.
    """
    text = completion.rpartition("</think>")[2]
    found = [text[start:end].strip() for start, end in boxes(text)]
    box = next(filter(None, reversed(found)), None)
    if not reference_letter(answer):
        return box
    return said_letter(text[-CLOSING_CHARS:]) if box is None else read_letter(box) or box


@lru_cache(maxsize=4096)  # several completions have the same reference
def parse_values(text: str, limit_s: int | None) -> list:
    """The values that Math-Verify finds in a text: sympy's, and as text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return parse(text, kinds, parsing_timeout=limit_s)


# ------------------------------------------------------------------------------------------------
# Boxes

BOX = r"\\(?:boxed|fbox)\s*\{"
BRACES = re.compile(rf"{BOX}|\\[{{}}]|\\\\(?!boxed|fbox)|[{{}}]")


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of complete `\boxed{...}` are in a text: (start, end), by start."""
    first = re.search(BOX, text)
    spans, unclosed = [], []  # for each unclosed brace: where a box's content starts, or None
    for brace in BRACES.finditer(text, first.start()) if first else ():
        if brace[0] == "}":
            content = unclosed.pop() if unclosed else None
            if content is not None:
                spans.append((content, brace.start()))
        elif brace[0] == "{":
            unclosed.append(None)
        elif brace[0] not in (r"\{", r"\}", r"\\"):
            unclosed.append(brace.end())
    return sorted(spans)


# ------------------------------------------------------------------------------------------------
# Letters: the patterns read what `plain` returns

FONTS = (
    r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal|up)?|mbox|boldsymbol|bm|bf|rm|operatorname"
    r"|emph|underline|tiny|small|[lL]arge|LARGE|[hH]uge)\b|\\(?:text)?color\s*\{[^{}]*\}"
)
SPACES = r"\\[ ,;:!]|\\q?quad\b|~|\s"
LETTER = re.compile(r"(?<![A-Za-z0-9\\])([A-J])(?![A-Za-z0-9'’])(?! [a-z])")  # not "A box"
IN_BOX = re.compile(  # C | (C) | C) 12 | C. none of these | Option C | The answer is C | 12 (C)
    r"(?i:(?:the )?(?:correct |final )?(?:answer|option|choice)(?: is)?:? )?"
    r"[(\[]?([A-J])(?:[)\].:]+.*)?|[^A-Z]* \(([A-J])\)\.?"
)
SAID = re.compile(  # The answer is (C) | Answer: C | the closest option would be C | 答案是C
    r"(?i:\banswer\b|\bans\b|(?:correct|right|best|closest) (?:option|choice)|答案|选项)"
    r"(?i:[ :是为]| is| (?:would|must|should) be| option| choice| therefore)*"
    r"[(\[]*([A-J])(?![A-Za-z0-9'’]|[(\[]\w| ?[=^_+*/])"
)
ALONE = re.compile(r"(?:^|[.!?:#] ?|\b(?i:so|thus|hence|therefore),? )[(\[]?([A-J])[)\].]*$")  # C


def reference_letter(answer: str) -> str | None:
    """The option letter that a reference answer is, however it is formatted, or None."""
    bare = re.sub(rf"{BOX}|{FONTS}|[][(){{}}$.\s]", "", answer)
    return bare if re.fullmatch("[A-J]", bare) else None  # "e" and "i" are numbers


def read_letter(box: str) -> str | None:
    """The option letter A-J that the content of a box names, or None; two letters name none."""
    text = re.sub(r"^[(\[]?[a-j](?=[)\].:]|$)", lambda match: match[0].upper(), plain(box))
    match = IN_BOX.fullmatch(text)
    return match[match.lastindex] if match and len(set(LETTER.findall(text))) < 2 else None


def said_letter(closing: str) -> str | None:
    """The letter of the last "the answer is (C)" in a text without a box, or alone at its end.

    A sentence with two letters names none.
    """
    text = plain(closing)
    for match in reversed([*SAID.finditer(text)]):
        sentence = re.split(r"[.!?](?: |$)", text[match.start(1) :], maxsplit=1)[0]
        return match[1] if set(LETTER.findall(sentence)) <= {match[1]} else None
    alone = ALONE.search(text)
    return alone and alone[1]


def plain(text: str) -> str:
    """A text without its markup, in one line."""
    text = unicodedata.normalize("NFKC", text).replace("。", ".")
    text = re.sub(rf"{FONTS}|\\(?:left|right)\b|\\[()[\]]|[{{}}$*`\"]", "", text)
    return re.sub(rf"(?:{SPACES})+", " ", text).strip(" \\")


# ------------------------------------------------------------------------------------------------
# Many answers


class Verifier:
    """Worker processes that grade. They start at once. Use as a context manager.

    Args:
        num_workers: processes that grade at the same time.
        timeout_s: CPU seconds that one answer may take before it counts as wrong; by the clock,
            WAITING_S more. Default: 0.8, for a reward function 10. Of 10,000 pairs of MATH-500's
            answers the slowest took 0.2 s.
        reward: "path/to/file.py:function" replaces the verifier. From a completion and an example,
            its row as attributes, the function makes a number in [0, 1].

    Raises RewardError if the reward function cannot be loaded.
    """

    def __init__(
        self, num_workers: int = 1, timeout_s: float | None = None, reward: str | None = None
    ):
        self.timeout_s = timeout_s or (REWARD_TIMEOUT_S if reward else TIMEOUT_S)
        self.reward = reward
        options = [str(self.timeout_s)] + ([reward] if reward else [])
        self.workers = [_Worker(options) for _ in range(num_workers)]
        if reward:  # a bad one is refused now, not after the first rollout
            try:
                for worker in self.workers:
                    worker.wait_until_ready()
            except BaseException:
                self.__exit__()
                raise

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.end()

    def score(
        self, completions: Sequence[str], references: Sequence[Reference]
    ) -> list[bool] | list[float]:
        """Which completions are right: (N,), (N,) -> (N,) verdicts, in the order of the inputs.

        With a reward function the references are the examples' rows, as dicts (id, question,
        solution, answer, source, and any other column), and the verdicts are its numbers.

        Raises ValueError if the lengths differ, TypeError if a reference is neither text nor a
        number, RewardError if grading itself fails, ChildProcessError if a worker cannot start.
        """
        return [graded.correct for graded in self.grade(completions, references)]

    def grade(self, completions: Sequence[str], references: Sequence[Reference]) -> list[Grade]:
        """Like `score`, and which answers were read: None for one that exceeds a limit."""
        if not self.reward:
            references = list(map(as_text, references))
        idle = queue.SimpleQueue()
        for worker in self.workers:
            idle.put(worker)

        def grade_one(pair: tuple[str, Reference]) -> Grade:
            worker = idle.get()
            try:
                return worker.grade(pair, self.timeout_s + WAITING_S)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self.workers)) as pool:  # a thread waits for each worker
            return list(pool.map(grade_one, zip(completions, references, strict=True)))


class _Worker:
    """A process that grades answers. When it dies, a new one takes its place."""

    def __init__(self, options: list[str]):
        self.options = options
        self.start()

    def start(self) -> None:
        # A fresh Python, because forking is unsafe with CUDA or threads, and multiprocessing's
        # spawn would import the trainer's script (torch, vLLM, ...) again.
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), *self.options],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward function prints goes to stderr
            process_group=0,  # Ctrl-C in a terminal does not reach it
        )
        theirs.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        """Raise RewardError if the reward function cannot be loaded."""
        if self.ready:
            return
        try:
            error = self.pipe.recv()
        except (EOFError, OSError) as died:
            raise ChildProcessError("a verifier process died while it started") from died
        if error:
            raise RewardError(error)
        self.ready = True

    def grade(self, pair: tuple[str, Reference], clock_s: float) -> Grade:
        self.wait_until_ready()
        try:
            self.pipe.send(pair)
            if not self.pipe.poll(clock_s):
                raise TimeoutError  # an OSError
            reply = self.pipe.recv()
        except (EOFError, OSError):  # it died of this answer, or waits for too long
            self.end()
            self.start()
            return Grade(False, None)
        if isinstance(reply, str):
            raise RewardError(reply)
        return Grade(*reply)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with all that it started
        self.process.wait()
        self.pipe.close()


def load_reward(reward: str) -> Callable[[str, dict], Grade]:
    """The function that "path/to/file.py:function" names, made to return a Grade."""
    path, _, name = reward.rpartition(":")
    if not os.path.isfile(path):
        raise RewardError(f"{reward}: there is no file {path!r}; expected file.py:function")
    sys.path.append(sys.path.pop(0))  # our folder, last: `import evaluate` is not ours
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # it may import its neighbours
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise RewardError(f"{reward}: {path} has no function {name!r}")

    def judge(completion: str, row: dict) -> Grade:
        value = function(completion, types.SimpleNamespace(**row))
        if not (isinstance(value, numbers.Real) and 0 <= value <= 1):
            raise ValueError(f"{name} returned {value!r:.80}, which is no number in [0, 1]")
        return Grade(float(value), None)

    return judge


def _serve(pipe: Connection, timeout_s: float, reward: str | None = None) -> None:
    """A worker: grade what comes through the pipe, until the trainer ends."""
    # A launcher may signal all processes, but the trainer decides when we end. Unlike SIG_IGN, a
    # handler is not inherited by programs that a reward function starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        judge = load_reward(reward) if reward else grade
    except RewardError as error:
        pipe.send(str(error))
        return
    except (Exception, SystemExit):
        pipe.send(f"{reward} cannot be loaded:\n{traceback.format_exc()}")
        return
    if not reward:
        logging.disable(logging.CRITICAL)  # Math-Verify warns about every answer it cannot read
        for answer in ("1", r"\frac{1}{2}", "0.5x", r"(3, \sqrt{2})"):
            grade(f"so it is {answer}", "1")  # the first answers are slow: they fill caches
            grade(rf"\boxed{{{answer}}}", "2")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_CAP, MEMORY_CAP))
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer has ended
        pipe.send(None)  # ready
        while True:
            pipe.send(_limited(judge, *pipe.recv(), timeout_s, reward or "the verifier"))


def _limited(judge: Callable, completion: str, reference: Reference, timeout_s: float, name: str):
    """A grade as a tuple, or the traceback of an error that is not the answer's."""
    signal.setitimer(signal.ITIMER_PROF, timeout_s)  # CPU time: SIGPROF ends this process
    signal.setitimer(signal.ITIMER_REAL, timeout_s + WAITING_S)  # if the trainer is dead
    try:
        return tuple(judge(completion, reference))
    except (MemoryError, RecursionError):
        return (False, None)
    except Exception:
        row = reference.get("id") if isinstance(reference, dict) else reference
        return f"{name}, row {row!r}:\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)  # not for programs that a reward function starts
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]), *sys.argv[3:])
