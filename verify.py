r"""What counts as right: one completion, one reference answer -> bool.

    is_correct(r"... so \boxed{\text{(C)}}", "C")    # True: letters are compared as letters
    is_correct(r"... so \boxed{\frac{1}{2}}", "0.5")  # True: everything else goes to Math-Verify

Completions are hostile input: `\boxed{9^{9^{9^{9}}}}` keeps a computer algebra system busy for
ever. So an answer that is huge, or would be when worked out, is right only if it is written exactly
like the reference. Everything else is graded in the processes of a `Verifier`, which have a
deadline and a memory limit: one that exceeds them is killed, and the answer counts as wrong.
A reward function of your own can take the verifier's place there: docs/verdicts.md shows how.
"""

import contextlib
import json
import logging
import math
import numbers
import os
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
from functools import lru_cache
from multiprocessing import Process, get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

CLOSING_CHARS = 300  # without a box, the answer has to be this close to the end
MAX_CHARS = 1000  # of an answer; what is longer is no answer
MAX_SIZE = 10_000  # digits, or terms, of an answer when worked out: no real one has nearly as many
ALGEBRA_S = 5  # for parsing, and for comparing, where no grader's deadline holds
TIMEOUT_S = 0.8  # CPU time of one answer
REWARD_TIMEOUT_S = 10.0  # CPU time of one call of a reward function
WAITING_S = 60  # beyond it, by the clock: for a core on a loaded host, a subprocess, a file
MEMORY_CAP = 2 * 2**30  # bytes of address space of one grading process
CHUNK = 8  # completions that a worker gets at a time, at most

MATH = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

BOX = r"\\(?:boxed|fbox)\s*\{"
BRACES = re.compile(rf"{BOX}|\\[{{}}]|\\\\(?!boxed|fbox)|[{{}}]")
FONTS = (
    r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal|up)?|mbox|boldsymbol|bm|bf|rm|operatorname"
    r"|emph|underline|tiny|small|[lL]arge|LARGE|[hH]uge)\b|\\(?:text)?color\s*\{[^{}]*\}"
)
SPACES = r"\\[ ,;:!]|\\q?quad\b|~|\s"
FILLING = rf"{SPACES}|[$*{{}}]|\\[()[\]]|\\text|[A-Za-z](?:_\w)? ?="  # and "x_1 ="
BESIDE = re.compile(rf"(?:{FILLING})*(?:[,;]|and|or)(?:{FILLING}|[,;]|and|or)*{BOX}")

# In text that `plain` has cleaned
OPERATOR = (  # "C - 1" is algebra, "C - the largest" is not
    r"(?:-(?! [A-Za-z]{2})|[+*/^_=>|≈≤≥≠±×·]|<(?!/)"
    r"|\\(?:approx|[lg]eq?|neq?|sim|equiv|cong|in|to|pm|times|cdot|div|cup|cap)\b)"
)
ARTICLE = r"[AI] (?!(?:is|as|and|or|because|since)\b)[a-z]"  # "A circle", "I think"
LEAD = r"(?:(?:the\s+)?(?:correct\s+|final\s+)?(?:answer|option|choice)(?:\s+is)?[\s:]*)?"
ANOTHER_LABEL = r"[(\[][A-J][)\]]|(?:^|\s)[A-J][).:\]]"
LETTER = (  # C and (c) anywhere, but not in "25°C", "P(C)", "C(x)"; c only in ": c" and "is c."
    rf"(?<![A-Za-z0-9\\°])(?<!° )(?<!\w\()(?:(?!{ARTICLE})([A-J])(?![A-Za-z0-9'’]|[(\[]\w)"
    r"|[(\[]([a-j])(?=[)\]])|(?<=: )([a-j])(?=\.?$)|(?<=is )([a-j])(?=\.(?!\w)))"
)
ANOTHER = rf" ?(?:(?:,|and|n?or|&) ?)+[(\[]?(?!{ARTICLE})[A-J](?![A-Za-z]| is)"  # "C or D"
RIGHT = r"is (?:the )?(?:correct|answer|(?:right|best) (?:answer|option|choice))\b"
STATEMENT = re.compile(
    # "The answer is (C)", "correct option: C", "答案是 C"; the first letter in the sentence, and
    # none if it is "not C", "C or D", "C + 1", "C is wrong"
    r"(?>(?:(?i:answer|\bans\b|(?:correct|right|best) (?:option|choice))|答案|故选)"
    rf"(?:(?!not\b|neither\b)[^.\n]|\.(?=\w)|(?<=i\.e)\.){{0,50}}?(?::\n+[(\[]?)?{LETTER})"
    rf"(?>[)\]]|(?! ?{OPERATOR}))(?!{ANOTHER}| is (?:not|wrong|incorrect)\b)"
    # "Therefore C.", "So it is (C)", "Thus (C) is correct"
    r"|\b(?i:so|thus|hence|therefore|actually),? (?:it is )?(?i:option |choice )?"
    rf"[(\[]?([A-J])[)\]]?(?= {RIGHT}|[.!](?!\w)|$)"
    # "**C**", "#### C", "Option C": all of the last line
    rf"|^(?:#+ )?(?:(?i:{LEAD})[(\[]?([A-J])|[(\[]?([a-j]))[)\]]?\.?\s*\Z",
    re.MULTILINE,
)
REMARK = re.compile(  # "(C) is correct", a sentence that counts where there is no statement
    rf"(?:^|[.!?:] )(?i:option |choice )?[(\[]?([A-J])[)\]]? {RIGHT}", re.MULTILINE
)


# ------------------------------------------------------------------------------------------------
# One completion


class RewardError(ValueError):
    """A reward function cannot be loaded, fails, or returns no number in [0, 1]. One line."""


class Grade(NamedTuple):
    correct: bool | float  # a number in [0, 1] if a reward function gave it
    extracted: str | None  # the answer that was read out of the completion, if there is one


Reference = str | dict  # the right answer; for a reward function, the example's row
Judge = Callable[[str, Reference], Grade]


def is_correct(completion: str, answer: str) -> bool:
    r"""Whether a model's completion arrives at the reference answer.

    The text after the last `</think>` is read (all of it if there is none). In it the last
    `\boxed{...}` counts; without a box, a closing "the answer is (C)" or "= 12". If the reference
    is a letter A-J, letters are compared; else Math-Verify compares values. Hostile input can take
    very long here: use a `Verifier` for text from a model.
    """
    # Math-Verify's own time limit is a signal, and only a main thread can receive signals.
    in_main = threading.current_thread() is threading.main_thread()
    return grade(completion, answer, ALGEBRA_S if in_main else None).correct


def grade(completion: str, answer: str, limit_s: int | None = None) -> Grade:
    """Like `is_correct`, and which answer was read. Parsing, and comparing, may take `limit_s`."""
    box = extract(completion, answer)
    if letter := reference_letter(answer):
        return Grade(box == letter, box)
    if box == answer.strip():
        return Grade(True, box)
    text = without_thinking(completion)
    closing, gold = text[-CLOSING_CHARS:], _parse_reference(answer, limit_s)
    if gold and isinstance(gold[0], sympy.FiniteSet):  # several values may stand in several boxes
        box = ", ".join(last_boxes(text)) or None
    if len(box or closing) > MAX_CHARS:
        return Grade(False, box)
    said = readable(closing) if box is None else rf"\boxed{{{readable(box)}}}"
    parsed = parse(said, MATH, parsing_timeout=limit_s)
    extracted = str(parsed[-1]) if box is None and parsed else box
    small = all(size(value) <= MAX_SIZE for value in (*gold, *parsed))
    return Grade(small and verify(gold, parsed, timeout_seconds=limit_s), extracted)


def extract(completion: str, answer: str) -> str | None:
    """The answer that a completion gives, by its text alone, so quickly whatever it holds.

    The last box; if the reference is a letter, the letter in it or in the closing. None if there
    is neither: `grade` then looks for a value in the closing.
    """
    text = without_thinking(completion)
    box = written[-1] if (written := last_boxes(text)) else None
    if not reference_letter(answer):
        return box
    return said_letter(text[-CLOSING_CHARS:]) if box is None else read_letter(box) or box


def without_thinking(completion: str) -> str:
    return completion.rpartition("</think>")[2]


@lru_cache(maxsize=4096)
def _parse_reference(answer: str, limit_s: int | None) -> list:
    return parse(rf"\boxed{{{readable(answer)}}}", MATH, parsing_timeout=limit_s)


def readable(text: str) -> str:
    r"""A value, or a closing, with what Math-Verify cannot read rewritten.

    >>> readable("**3 1/2**."), readable(r"1\,000\ "), readable("90°")
    ('7/2', '1000', '90^\\circ')
    """
    text = text.replace("`", "").replace("°", r"^\circ")
    text = re.sub(r"(?<![\w)}\]])\*\*|\*\*(?![\w({\[\\-])", "", text)  # bold, and not a power
    text = re.sub(r"^[\s*]+|(?:[\s*\\]|(?<!\.)\.)+$", "", text)
    text = re.sub(r"(?<=\d)(?<![\^_]\d)(?:\\[ ,;:!]|~)(?=\d{3}(?!\d))", "", text)
    mixed = r"(?<![\d./^_])(\d+)(?: |\\[ ,])+(\d+)/(\d+)"
    return re.sub(mixed, lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)


def size(value) -> float:
    """About how many digits, or terms, a parsed answer has when worked out; inf above MAX_SIZE.

    >>> size(parse("$2^{100}$")[0])
    30.102999566398122
    """
    if not isinstance(value, sympy.Basic):
        return 1  # text, or a matrix
    if isinstance(value, sympy.Integral):
        return math.inf  # no answer: to work it out may take for ever
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


def last_boxes(text: str) -> list[str]:
    r"""What the last complete `\boxed{...}` that is not empty contains, and the boxes beside it.

    Beside it stand those of `\boxed{3} and \boxed{4}`, or of `$x=\boxed{3}$, $y=\boxed{4}$`.
    """
    spans = [span for span in boxes(text) if text[slice(*span)].strip()]
    first = max(0, len(spans) - 1)
    while first > 0 and BESIDE.fullmatch(text, spans[first - 1][1] + 1, spans[first][0]):
        first -= 1
    return [text[slice(*span)].strip() for span in spans[first:]]


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
    """The letter of the last statement such as "the answer is (C)" in a text without a box."""
    text = "\n".join(map(plain, closing.splitlines()))
    said = [*STATEMENT.finditer(text)] or [*REMARK.finditer(text)]
    return said[-1][said[-1].lastindex].upper() if said else None


def plain(line: str) -> str:
    r"""A line without fonts, colours, dollars, stars, braces, and forms such as `（` or `\quad`."""
    line = unicodedata.normalize("NFKC", line).replace("。", ".")
    line = re.sub(rf"{FONTS}|\\(?:left|right)\b|\\[()[\]]|[{{}}$*`]", "", line)
    return re.sub(rf"(?:{SPACES})+", " ", line).strip(" \\")


def read_letter(text: str) -> str | None:
    r"""The one option letter A-J that `text`, the content of a box, names, or None.

    Reads `C`, `(C)`, `C.`, `\text{(C)}`, `\mathbf{C}`, `C) 12`, `Option C`, `12 (C)`. Two letters,
    or a letter that is part of algebra (`C^2`, `C = 12`, `AB`), name no option.
    """
    text = plain(text)
    if re.fullmatch(r"[(\[]?[a-j][)\]]?[.:]?", text):
        text = text.upper()

    labelled = re.fullmatch(rf"(?i:{LEAD})(?:[(\[] ?([A-J]) ?[)\]]|([A-J]) ?[).:\]])(.*)", text)
    if labelled:  # its own punctuation sets the letter off from the option's text
        rest = labelled[3].strip()
        nothing_but_letters = re.fullmatch(r"(?:[A-J]\b|and|or|[\s,;/&])+", rest)
        if nothing_but_letters or re.search(ANOTHER_LABEL, rest):
            return None
        return labelled[1] or labelled[2]
    bare = re.fullmatch(rf"(?i:{LEAD})(?!{ARTICLE})([A-J])(?: ?[,;] ?| (?!{OPERATOR})|$)(.*)", text)
    if bare:
        return None if re.search(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])", bare[2]) else bare[1]
    trailing = re.fullmatch(r"([^A-J]*) [(\[]([A-J])[)\]]\.?", text)
    return trailing[2] if trailing else None


# ------------------------------------------------------------------------------------------------
# Many answers


class Verifier:
    """A pool of graders, which start at once. Use as a context manager.

    Args:
        num_workers: processes that grade at the same time.
        timeout_s: CPU seconds that one answer may take before it counts as wrong; by the clock,
            WAITING_S more. Default: 0.8, for a reward function 10. Of 10,000 pairs of MATH-500's
            answers the slowest took 0.2 s.
        reward: "path/to/file.py:function" takes the verifier's place. From a completion and an
            example, its row as attributes, the function makes a number in [0, 1]. RewardError is
            raised if it cannot be loaded.
    """

    def __init__(
        self, num_workers: int = 1, timeout_s: float | None = None, reward: str | None = None
    ):
        self.num_workers = num_workers
        self.timeout_s = timeout_s or (REWARD_TIMEOUT_S if reward else TIMEOUT_S)
        self.reward = reward
        # Each worker is a fresh Python: it is not safe to fork a process with CUDA or threads, and
        # multiprocessing's spawn would import the caller's script (torch, vLLM, ...) again.
        options = [str(self.timeout_s)] + ([self.reward] if self.reward else [])
        self.workers = [
            subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C in a terminal reaches only us, and we decide
            )
            for _ in range(self.num_workers)
        ]
        if self.reward:
            try:
                for worker in self.workers:
                    _ask(worker, [])  # has it loaded the function?
            except BaseException:
                self.__exit__()
                raise

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                worker.stdin.close()  # a worker ends with its input, so also if we are killed
        for worker in self.workers:
            worker.wait()

    def score(
        self, completions: Sequence[str], references: Sequence[Reference]
    ) -> list[bool] | list[float]:
        """Which completions are right: (N,), (N,) -> (N,) verdicts, in the order of the inputs.

        With a reward function the references are the examples' rows, as dicts that JSON can hold
        (id, question, solution, answer, source, and any other), and the verdicts are its numbers.

        Raises ValueError if the lengths differ, RewardError if the reward function fails,
        ChildProcessError if a worker was lost.
        """
        rewards = [graded.correct for graded in self.grade(completions, references)]
        return list(map(float, rewards)) if self.reward else rewards

    def grade(self, completions: Sequence[str], references: Sequence[Reference]) -> list[Grade]:
        """Like `score`, and which answers were read. What takes too long is wrong, and not read."""
        pairs = list(zip(completions, references, strict=True))
        grades: list[Grade | None] = [None] * len(pairs)
        chunk = max(1, min(CHUNK, len(pairs) // (4 * self.num_workers)))
        starts = iter(range(0, len(pairs), chunk))  # shared: each thread takes the next one

        def drive(worker: subprocess.Popen) -> None:
            for start in starts:
                grades[start : start + chunk] = _ask(worker, pairs[start : start + chunk])

        with ThreadPoolExecutor(self.num_workers) as pool:
            list(pool.map(drive, self.workers))  # raises what a thread has raised
        return grades


def _ask(worker: subprocess.Popen, pairs: list[tuple[str, Reference]]) -> list[Grade]:
    request = json.dumps(pairs, default=str)  # a column may hold anything
    try:
        worker.stdin.write(request + "\n")
        worker.stdin.flush()
        reply = json.loads(worker.stdout.readline())
    except (OSError, ValueError) as error:
        message = "a verifier process ended unexpectedly (killed, or out of memory?)"
        raise ChildProcessError(message) from error
    for graded in reply:
        if isinstance(graded, str):
            raise RewardError(graded)
    return [Grade(*graded) for graded in reply]


def load_reward(reward: str) -> Judge:
    """The function that "path/to/file.py:function" names, as one that grades like `grade`.

    Raises RewardError if it cannot be loaded; what is returned does so if the function fails.
    """
    path, _, name = reward.rpartition(":")
    if not os.path.isfile(path):
        raise RewardError(f"{reward}: expected file.py:function, and there is no file '{path}'")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # it may import its neighbours

    def explain(error: BaseException) -> str:  # in one line, with the last line of the user's file
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"line {frame.lineno}: " for frame in frames if frame.filename == path]
        return "".join([*lines[-1:], f"{type(error).__name__}: ", " ".join(str(error).split())])

    try:
        function = runpy.run_path(path).get(name)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{path} cannot be loaded: {explain(error)}") from error
    if not callable(function):
        raise RewardError(f"{path} has no function {name!r}")

    def judge(completion: str, row: dict) -> Grade:
        call = f"{reward}, row {row.get('id')!r}"
        try:
            value = function(completion, types.SimpleNamespace(**row))
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise RewardError(f"{call}: {explain(error)}") from error
        if not (isinstance(value, numbers.Real) and 0 <= value <= 1):
            raise RewardError(f"{call}: returned {value!r:.80}, which is no number in [0, 1]")
        return Grade(float(value), None)

    return judge


def _serve(timeout_s: float, reward: str | None = None) -> None:
    """A worker: grade chunks from stdin in a forked child, and replace a child that hangs or dies.

    The worker itself never reads a completion, so nothing that a model writes can stop it. It has
    loaded Math-Verify, or the reward function, so a new child is ready in milliseconds.
    """
    # A launcher may signal all processes; the trainer decides when we end. Unlike SIG_IGN, a
    # handler is not inherited by programs that a reward function starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A reward function may print, and start programs that read: not from the trainer's pipes.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if reward:
        try:
            judge = load_reward(reward)
        except RewardError as error:
            requests.readline()
            print(json.dumps([str(error)]), file=replies, flush=True)
            return
    else:
        judge = grade
        logging.disable(logging.CRITICAL)  # Math-Verify warns about every answer it cannot read
        for answer in ("1", r"\frac{1}{2}", "0.5x", r"(3, \sqrt{2})", r"\prod_{i=1}^3 \sin(i!)"):
            grade(f"so it is {answer}", "1")  # Math-Verify and sympy fill their caches at the
            grade(rf"\boxed{{{answer}}}", "2")  # first answers, and every child inherits them
    child = pipe = None
    with contextlib.suppress(BrokenPipeError):  # the trainer was killed
        for line in requests:
            pairs, grades = json.loads(line), []
            while len(grades) < len(pairs):
                if child is None:
                    child, pipe = _fork_grader(judge, timeout_s)
                with contextlib.suppress(EOFError, OSError):  # it died, of time or memory or a bug
                    pipe.send(pairs[len(grades) :])
                    while len(grades) < len(pairs) and pipe.poll(timeout_s + WAITING_S):
                        grades.append(pipe.recv())
                if len(grades) < len(pairs):
                    grades.append(Grade(False, None))
                    _end(child)
                    child = None
            print(json.dumps(grades), file=replies, flush=True)
    if child is not None:
        _end(child)


def _fork_grader(judge: Judge, timeout_s: float) -> tuple[Process, Connection]:
    context = get_context("fork")  # safe: this process has one thread, no CUDA
    ours, theirs = context.Pipe()
    child = context.Process(target=_grade, args=(judge, timeout_s, ours, theirs), daemon=True)
    child.start()
    os.setpgid(child.pid, child.pid)  # a group of its own, with all that it starts
    theirs.close()
    return child, ours


def _end(grader: Process) -> None:
    os.killpg(grader.pid, signal.SIGKILL)
    grader.join()


def _grade(judge: Judge, timeout_s: float, ours: Connection, theirs: Connection) -> None:
    ours.close()  # else the pipe would not end with the worker
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_CAP, MEMORY_CAP))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the worker has ended
        while True:
            for completion, reference in theirs.recv():
                signal.setitimer(signal.ITIMER_PROF, timeout_s)  # of CPU time; SIGPROF ends us
                try:
                    graded = judge(completion, reference)
                except (MemoryError, RecursionError):
                    graded = Grade(False, None)
                except RewardError as error:
                    graded = str(error)
                signal.setitimer(signal.ITIMER_PROF, 0)
                theirs.send(graded)


if __name__ == "__main__":
    _serve(float(sys.argv[1]), *sys.argv[2:])
