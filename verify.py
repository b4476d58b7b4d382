r"""What counts as right: one completion, one reference answer -> bool.

    is_correct(r"... so \boxed{\text{(C)}}", "C")    # True: letters are compared as letters
    is_correct(r"... so \boxed{\frac{1}{2}}", "0.5")  # True: everything else goes to Math-Verify

Completions are hostile input: `\boxed{9^{9^{9^{9}}}}` keeps a computer algebra system busy forever.
Two things protect the trainer. An answer that is huge when worked out is right only if it is
written exactly like the reference. And a `Verifier` grades in worker processes with a limit on CPU
time and memory. An answer that exceeds a limit kills its worker: it counts as wrong, and a new
worker takes over. docs/verdicts.md has the rules, and how to use a reward function of your own.
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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it takes half a second to import, and a trainer's own process grades nothing
    import sympy

CLOSING_CHARS = 300  # without a box, the answer must be in the last 300 characters
MAX_CHARS = 1000  # a longer answer is wrong
MAX_SIZE = 10_000  # digits, or terms, of an answer when worked out
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
    answer = as_text(answer)
    box = extract(completion, answer)
    if letter := reference_letter(answer):
        return Grade(box == letter, box)
    if box == answer.strip():
        return Grade(True, box)
    if word := as_word(answer):  # to algebra words are products, and "no" is "on"
        return Grade(word == as_word(box or ""), box)
    if box and UNREAD.match(box) and not UNREAD.match(answer):
        return Grade(False, box)
    if box and is_equation(box) and not EQUALS.search(answer):
        return Grade(False, box)
    import sympy
    from math_verify import verify

    text = completion.rpartition("</think>")[2]
    closing = text[-CLOSING_CHARS:]
    gold = parse_values(rf"\boxed{{{readable(answer)}}}", limit_s)
    if gold and isinstance(gold[0], sympy.FiniteSet):  # several values may be in several boxes
        box = ", ".join(last_boxes(text)) or None
    if len(box or closing) > MAX_CHARS:
        return Grade(False, box)
    said = readable(closing) if box is None else rf"\boxed{{{readable(box)}}}"
    parsed = parse_values(said, limit_s)
    extracted = str(parsed[-1]) if box is None and parsed else box
    small = all(size(value) <= MAX_SIZE for value in (*gold, *parsed))
    return Grade(small and verify(gold, parsed, timeout_seconds=limit_s), extracted)


def extract(completion: str, answer: str) -> str | None:
    """The answer that a completion gives, read without algebra, so fast on any text.

    The last box; if the reference is a letter, the letter in it or in the closing. None if there
    is neither: `grade` then looks for a value in the closing.
    """
    text = completion.rpartition("</think>")[2]
    box = written[-1] if (written := last_boxes(text)) else None
    if not reference_letter(answer):
        return box
    return said_letter(text[-CLOSING_CHARS:]) if box is None else read_letter(box) or box


@lru_cache(maxsize=4096)  # several completions have the same reference
def parse_values(text: str, limit_s: int | None) -> list:
    """The values that Math-Verify finds in a text: sympy's, and as text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return parse(text, kinds, parsing_timeout=limit_s)


def as_word(text: str) -> str | None:
    r"""Two or more plain letters, `no` or `\text{No solution}.`, in small letters; else None."""
    word = plain(text).removesuffix(".").casefold()
    return word if re.fullmatch("[a-z][a-z ]*[a-z]", word) else None


def is_equation(box: str) -> bool:
    r"""Whether a box holds `x + 1 = 6`. Not if the left side is a name: `x = 6`, `f(x) = 6`."""
    for equals in EQUALS.finditer(box):
        left = box[: equals.start()]
        if left.count("{") == left.count("}") and left.count("(") == left.count(")"):
            return not NAME.fullmatch(plain(left))
    return False


def readable(text: str) -> str:
    r"""A value, or a closing, in a form that Math-Verify can read.

    >>> readable("**3 1/2**."), readable(r"1\,000\ "), readable("90°"), readable("2e-3")
    ('7/2', '1000', '90^\\circ', '0.002')
    """
    text = re.sub("[⁻⁰¹²³⁴-⁹]+", r"^{\g<0>}", text)  # NFKC makes a plain 2 of "²"
    text = unicodedata.normalize("NFKC", re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text))
    text = re.sub(r"√(?:(\d+|[A-Za-z])|\(([^()]*)\))", r"\\sqrt{\1\2}", text)
    text = text.translate({ord("−"): "-", ord("⁄"): "/", ord("`"): None, ord("°"): r"^\circ"})
    text = re.sub(r"(?<![\w)}\]])\*\*|\*\*(?![\w({\[\\-])", "", text)  # **bold**, but not 2**3
    text = re.sub(r"^[\s*]+|(?:[\s*\\]|(?<!\.)\.)+$", "", text)
    thousands = r"(?<=\d)(?<!\d{4})(?<![\^_]\d)(?:\\[ ,;:!]|~| )(?=\d{3}(?![\d/]))"
    text = re.sub(thousands, "", text).replace("~", " ")
    exponent = r"(?<![\w.\\])(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}(?![\w.]*\w)"
    text = re.sub(exponent, lambda m: f"{Decimal(m[0]):f}", text)
    mixed = r"(?<![\d./^_])(\d+)(?: |\\[ ,])+(\d+)/(\d+)"
    return re.sub(mixed, lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)


def size(value) -> float:
    """About how many digits, or terms, a parsed answer has when worked out; inf above MAX_SIZE.

    >>> round(size(parse_values("$2^{100}$", None)[0]))
    30
    """
    import sympy

    if not isinstance(value, sympy.Basic):
        return 1  # text, or a matrix
    if isinstance(value, sympy.Integral):
        return math.inf  # working it out may take forever
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
# Boxes

BOX = r"\\(?:boxed|fbox)\s*\{"
BRACES = re.compile(rf"{BOX}|\\[{{}}]|\\\\(?!boxed|fbox)|[{{}}]")
FONTS = (
    r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal|up)?|mbox|boldsymbol|bm|bf|rm|operatorname"
    r"|emph|underline|tiny|small|[lL]arge|LARGE|[hH]uge)\b|\\(?:text)?color\s*\{[^{}]*\}"
)
SPACES = r"\\[ ,;:!]|\\q?quad\b|~|\s"
EQUALS = re.compile(r"(?<![<>!:])=")
NAME = re.compile(  # x, x_1, f(x), (x, y), \angle ABC, \text{Area}; not 2x, \sqrt{x}
    r"""\(? (?> \\(?!\w?frac|sqrt|cdot|times|div|pm|mp|sin|cos|tan|log|ln|exp|sum|prod|int|lim)
                [A-Za-z]+ | [^\W\d_] | _\w* | ['’,: ] )+ \)? (?:\([^()]*\))? \ ?""",
    re.VERBOSE,
)
UNREAD = re.compile(  # a relation, a number in another base, a list that is not written out
    r"\s*(?:[<>=≤≥≠≈]|\\(?:[lg]eq?(?:slant)?|[lg]t|neq?|approx|sim|equiv)\b)"
    r"|.*(?:\d_|\\[lc]?dots|\.\.\.|…)",
    re.DOTALL,
)
FILLING = rf"{SPACES}|[$*{{}}]|\\[()[\]]|\\text|[A-Za-z](?:_\w)? ?="  # and "x_1 ="


def last_boxes(text: str) -> list[str]:
    r"""What the last complete `\boxed{...}` that is not empty contains, and the boxes joined to it.

    Joined are those of `\boxed{3} and \boxed{4}`, or of `$x=\boxed{3}$, $y=\boxed{4}$`.
    """
    spans = [(start, end) for start, end in boxes(text) if text[start:end].strip()]
    first = max(0, len(spans) - 1)
    while first > 0:
        between = text[spans[first - 1][1] + 1 : text.rindex("\\", 0, spans[first][0])]
        if not re.fullmatch("(?:[,;]|and|or)+", re.sub(FILLING, "", between)):
            break
        first -= 1
    return [text[start:end].strip() for start, end in spans[first:]]


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
# Letters: these patterns read what `plain` returns

LEAD = r"(?i: (?:the\ )?(?:correct\ |final\ )?(?:answer|option|choice)(?:\ is)?[ :]* )?"
OPTION = r"(?i:(?:option|choice):?\ )?[(\[]?[A-J][)\]]?"
RIGHT = r"\ is\ (?:the\ )?(?:correct|answer|(?:right|best)\ (?:answer|option|choice))\b"
ARTICLE = r"(?: [AI]\ (?!(?:is|as|and|or|because|since)\b)[a-z] | I(?:,|\ and|\ or)\ I )"  # "A box"
OPERATOR = r"""(?: [+*/^_=>|≈≤≥≠±×·] | -(?!\ [A-Za-z]{2}) | <(?!/)  # "C - 1", not "C - Paris"
    | \\(?:approx|[lg]eq?|neq?|sim|equiv|cong|in|to|pm|times|cdot|div|cup|cap)\b )"""

LETTER = re.compile(
    rf"""
    (?<! [A-Za-z0-9\\°] ) (?<! °\  ) (?<! \w\( )                # but not "25 °C", "f(C)"
    (?! {ARTICLE} ) ([A-J])
    (?! [A-Za-z0-9'’] | [(\[.]\w | \ ?{OPERATOR} )                # but not "C(x)", "C = 3"
    """,
    re.VERBOSE,
)
IN_BOX = re.compile(
    rf"""
    {LEAD} [(\[]?\ ? (?!{ARTICLE}) ([A-J])                        # (C) 12 | C. 12 | C | Option C
        (?: \ ?[).:\],;] | \ (?!{OPERATOR}) | $ )
        (?! \^ | .* (?<![A-Za-z\\]) (?!{ARTICLE}) [A-J] (?![A-Za-z]) )  # but not "C or D"
        .*
    | (?> \\[a-z]+ | \b[a-z]{{1,2}}\b | [^A-Za-z] )*             # 12 (C) | 3 km (C)
        \ [(\[]([A-J])[)\]]\.?
    """,
    re.VERBOSE,
)
LINK = r"""(?: \b(?i: is | (?:must|should|would|will|has\ to)\ be | therefore | thus | hence
    | clearly | indeed | the | correct | right | best | final | answer | choice | option | letter
    | which | i\.e | corresponds\ to | I\ get | we\ get )\b | [是为选项应该] | [^A-Za-z一-鿿] )"""
STATEMENT = re.compile(  # a sentence that says which option is right
    rf"""
    (?: (?i: answer | \bans\b | (?:correct|right|best)\ (?:option|choice) ) | 答案 | 故选 )
        {LINK}{{0,40}}? {LETTER.pattern}                          # The answer is 12, option C
    | ^(?i:so|thus|hence|therefore|actually),?\ (?:it\ is\ )? {OPTION} (?: {RIGHT} | [.!]?$ )
    | ^{OPTION} {RIGHT}                                           # (C) is correct
    """,
    re.VERBOSE,
)
DOUBT = re.compile(  # in such a sentence, or in a box: then it names no option
    r"""
    \? | n['’]t\b | \b(?:wrong|incorrect|impossible)\b | \bnot?\W*$
    | (?<! [A-J][).:\]]\  )                                       # but not "(C) none of these"
      \b(?: not | no(?!,) | none | nor | neither | never | cannot | false | except | without
        | doubt\w* | exclude\w* | eliminate\w* | out | if | whether | suppose )\b
    | (?: [,;/&] | \b(?:and|or) )\ ?[(\[]?(?-i:[b-hj])\b         # C, d
    | [不非错除]
    """,
    re.VERBOSE | re.IGNORECASE,
)


def reference_letter(answer: str) -> str | None:
    """The option letter that a reference answer is, however it is formatted, or None."""
    bare = re.sub(rf"{BOX}|{FONTS}|[][(){{}}$.\s]", "", answer)
    return bare if re.fullmatch("[A-J]", bare) else None  # "e" and "i" are numbers


def read_letter(text: str) -> str | None:
    r"""The one option letter A-J that `text`, the content of a box, names, or None.

    Reads `C`, `(C)`, `C.`, `\text{(C)}`, `\mathbf{C}`, `C) 12`, `Option C`, `12 (C)`. Two letters,
    a letter that is part of algebra (`C^2`, `C = 12`, `AB`), or a negation name no option.
    """
    match = IN_BOX.fullmatch(text := plain(text))
    return match[match.lastindex] if match and not DOUBT.search(text) else None


def said_letter(closing: str) -> str | None:
    """The letter of the last statement such as "the answer is (C)" in a text without a box.

    A statement with a second letter, a negation or a question mark says nothing, and takes back
    what was said of its letters before.
    """
    text = "\n".join(map(plain, closing.splitlines()))
    unfinished = r":\n+|(?<=[A-J])[).\]]*\n+(?=[(\[]?[A-J]\b)"  # the next line belongs to it
    text = re.sub(unfinished, ": ", text)
    text = re.sub(rf"(?:^|\n)(?:#+ )?({OPTION})\.?\s*$", r"\nAnswer: \1", text)  # the last line
    said = None
    for sentence in re.split(r"(?<=[.!?])(?<!i\.e\.) +(?=[^a-z])|\n", text):
        letters, doubt = set(LETTER.findall(sentence)), DOUBT.search(sentence)
        statement = STATEMENT.search(sentence)
        if statement and len(letters) == 1 and not doubt:
            said = letters.pop()
        elif said in letters and (statement or doubt):
            said = None
    return said


def plain(line: str) -> str:
    """A line without its markup, and with the lower-case letters of options in capitals.

    >>> plain(r"$\\text{Answer: }$ **c**."), plain("（c） 12"), plain("f(x) = c")
    ('Answer: C.', '(C) 12', 'f(x) = c')
    """
    line = unicodedata.normalize("NFKC", line).replace("。", ".")
    line = re.sub(rf"{FONTS}|\\(?:left|right)\b|\\[()[\]]|[{{}}$*`]", "", line)
    line = re.sub(rf"(?:{SPACES})+", " ", line).rstrip(" \\").lstrip()
    option = r"[(\[][a-j](?=[)\]])|(?:^|[:#] )[a-j](?=[.:)\]]?$)|\bis [a-j](?=\.(?!\w))"
    return re.sub(option, lambda match: match[0][:-1] + match[0][-1].upper(), line)


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
