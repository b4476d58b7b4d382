r"""What counts as right: one completion, one reference answer -> bool.

    is_correct(r"... so \boxed{\text{(C)}}", "C")    # True: letters are compared as letters
    is_correct(r"... so \boxed{\frac{1}{2}}", "0.5")  # True: everything else goes to Math-Verify

Completions are hostile input: `\boxed{9^{9^{9^{9}}}}` keeps a computer algebra system busy forever.
So a `Verifier` grades in processes with limits on CPU time and memory, not on files or the network.
An answer beyond them, or at which the algebra raises, is wrong. docs/verdicts.md has the rules.
"""

import contextlib
import logging
import math
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
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

CLOSING_CHARS = 300  # without a box, the answer must be in the last 300 characters
MAX_CHARS = 1000  # a longer box is wrong, unless it is the reference to the letter
TIMEOUT_S = 0.8  # CPU time of one answer; the slowest of 10,000 pairs from MATH-500 took 0.2
REWARD_TIMEOUT_S = 10.0  # CPU time of one call of a reward function
WAITING_S = 60  # extra time by the clock: for a core on a loaded host, a subprocess, a file
MEMORY_CAP = 2 * 2**30  # bytes of address space of one worker


class RewardError(ValueError):
    """A reward function cannot be loaded, fails, or returns no number in [0, 1]."""


class Grade(NamedTuple):
    correct: bool | float  # a number in [0, 1] if a reward function gave it
    extracted: str | None  # the answer that was read out of the completion
    ungraded: bool = False  # wrong because grading it raised, or ran into a limit


UNGRADED = Grade(False, None, ungraded=True)


# ---- One completion ------------------------------------------------------------------------------


def is_correct(completion: str, answer: str) -> bool:
    r"""Whether a completion's last `\boxed{...}`, or else its closing, is the reference answer.

    A model's text may be hostile: use a `Verifier`. Raises RuntimeError outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # Math-Verify cannot stop there.
        raise RuntimeError("is_correct works only in the main thread: use a Verifier")
    return grade(completion, answer, limit_s=5).correct


def grade(completion: str, reference: str, limit_s: int | None = None) -> Grade:
    """Like `is_correct`, plus the answer it read. `limit_s` bounds each parse and comparison.

    Raises TypeError if the reference is neither text nor a number.
    """
    reference = re.sub(INTRO, "", as_text(reference).strip())
    box = extract(completion, reference)
    if letter := reference_letter(reference):
        return Grade(box == letter, box)
    closing = completion.rpartition("</think>")[2][-CLOSING_CHARS:]
    answer = box or said_answer(closing)

    # The same text, the same word (so one is left of two), or an option's small letter?
    words = {plain(each).rstrip(".").casefold() for each in (reference, answer or closing)}
    same_word = len(words) == 1 and re.fullmatch("no|[a-z]{3,}", *words)
    same_label = re.fullmatch("[a-j]", reference) and re.match(rf"\(?{reference}\)", box or "")
    if answer == reference or same_word or same_label:
        return Grade(True, answer)
    if box and (len(box) > MAX_CHARS or "{cases}" in box):  # Math-Verify reads one case only.
        return Grade(False, box)

    # The same value?
    units = not re.search("[A-Za-z]", re.sub(NO_VARIABLE, "", reference))
    gold, text = rf"\boxed{{{reference}}}", rf"\boxed{{{answer}}}" if answer else closing
    readable = parse_values(gold, units, limit_s, whole=True)
    try:
        if readable and not box and not parse_values(text, units, limit_s, whole=True):
            answer, text = None, closing  # What is said is no value, but the closing may hold one.
        pairs = [(re.sub(old, new, gold), re.sub(old, new, text)) for old, new in READINGS]
        equal = any(same_value(*pair, units, limit_s) for pair in dict.fromkeys(pairs))
        parsed = parse_values(text, units, limit_s)
        return Grade(equal, answer or (str(parsed[-1]) if parsed else None))
    except Exception:  # sympy raises any kind: at a sum that diverges, at 1/0 in a sine.
        return Grade(False, answer, ungraded=True)


def same_value(gold: str, text: str, units: bool, limit_s: int | None) -> bool:
    """Decimals to six places and five digits, other numbers exactly, the rest by Math-Verify."""
    from math_verify import grader, verify
    from sympy import Eq, Float

    wanted = parse_values(gold, units, limit_s, whole=True)
    if not wanted:  # Not all of it can be read, and a number in it is not its value.
        return plain(gold).replace(" ", "") == plain(text).replace(" ", "")
    parsed = parse_values(text, units, limit_s)
    pair = [found[0] for found in (wanted, parsed) if found]
    if not all(isinstance(each, Eq) for each in pair):  # The value of x = 5 is 5.
        pair = [grader.unwrap_eq(each) for each in pair]
    if len(pair) < 2 or not all(getattr(each, "is_comparable", False) for each in pair):
        return verify(wanted, parsed, timeout_seconds=limit_s)
    if any(each.has(Float) for each in pair):
        a, b = map(float, pair)
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=min(5e-7, 1e-5 * abs(a)))
    a, b = (each.doit() for each in pair)
    if a == b or (a.is_rational and b.is_rational):
        return a == b
    return bool(abs(a - b).evalf(5, maxn=200) < 1e-150)


def extract(completion: str, reference: str) -> str | None:
    """The answer that a completion gives, read without algebra, so fast on any text: its last box.

    If the reference is a letter: the letter in it, or in the closing after it. None if it has none.
    """
    text = completion.rpartition("</think>")[2]
    start, end = max(((i, j) for i, j in boxes(text) if text[i:j].strip()), default=(0, 0))
    box = text[start:end].strip()
    if not reference_letter(reference):
        return box or None
    return read_letter(box) or said_letter(text[end:][-CLOSING_CHARS:])


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of complete `\boxed{...}` are in a text: (start, end), by start."""
    spans, unclosed = [], []  # for each unclosed brace: where a box's content starts, or None
    for brace in re.finditer(rf"{BOX}|\\[{{}}]|\\\\(?!boxed|fbox)|[{{}}]", text):
        if brace[0] == "}" and unclosed:
            spans.append((unclosed.pop(), brace.start()))
        elif brace[0] == "{":
            unclosed.append(None)
        elif brace[0] not in ("}", r"\{", r"\}", r"\\"):
            unclosed.append(brace.end())
    return sorted((start, end) for start, end in spans if start is not None)


BOX = r"\\(?:boxed|fbox)\s*\{"
INVISIBLE = r"[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"  # Unicode's Cf
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCIENTIFIC = r"(?<![\w^.,])(\d+\.?\d*)(?:[eE]| ?(?:\\times|[x×]) ?10\^)"  # 3e6, 3.7 x 10^5
EXPONENT = r"([({])?([-+−]?\d{1,3})(?(2)[)}]|(?!\w))"
LATEX = (  # What Math-Verify misreads, and how it is written instead.
    (rf"{INVISIBLE}|[€£]", ""),  # €12 -> 12
    ("[⁰¹²³⁴-⁹⁻]+", lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}"),  # x²
    *((rf"(?<=\d)\s*(\\text\{{)?\s*{w}\b", rf"e{n} \1") for w, n in POWERS.items()),  # 3 million
    (SCIENTIFIC + EXPONENT, lambda n: f"{Decimal(f'{n[1]}e{n[3]}'.replace('−', '-')):f}"),
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))", ""),  # 2{,}500 -> 2500
    (r"\^\{\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\}", ""),  # 12^{\text{th}} -> 12
    (r"(?:√|\\?(?<![A-Za-z])sqrt) ?\(([^()]*)\)|√ ?(\d+|\w)", r"\\sqrt{\1\2}"),  # √7, sqrt(7)
    (r"(\\[dt]?frac)\s*(\{[^{}]*\}|\w)\s+(?=[\w{])", r"\1{\2}"),  # \frac {a} 5
    (r"(?<=[\d)}])\s*(?=\\[dt]?binom)", r"\\cdot "),  # 3\binom{6}{2}
    (r"\.(?=[\s$}\])\\]*$)|\s+(?=\\\]$)", ""),  # a period at the end
)
WORDS = r"(?!.*\b(?:dozen|hal[fv]|third|quarter|and|or|to|sin|cos|log))[A-Za-z]{3}[A-Za-z ]*"
UNIT = rf"[A-Za-z]+/[A-Za-z]+| [ckm]?m| k?g| s| L| ft| in| lb| {WORDS}"
UNITS = rf"(?<=\d) ?(?:{UNIT})(?:\^\d|\^\{{\d\}})?(?=\.?\}}?$)"  # 12 m/s | 12 cm^2 | 12 hours
TEXT = r"\\(?:text|mathrm|mbox|begin|end)\s*\{[^{}]*\}"
NO_VARIABLE = rf"{TEXT}|\\[A-Za-z]+|sqrt|(?<=\d)[eE](?=[-+\d])|{UNITS}"
READINGS = (("^", ""), (r"\\?%", ""), (r"\\log(?! *_)", r"\\ln"))  # as is | 35\% as 35 | log as ln
# #### 72 | The answer is 72. | Option D
INTRO = r"^(?i:#+|(?:\w+ ){0,2}(?:answer(?: is:?|:)|(?:option|choice)(?: is)?(?= \(?[A-J]\b))) +"
ANSWER_IS = r"(?i)\banswer\b(?:\W{0,4}(?:\bis\b|:))+[\s:*}]*"
# 12. Thus | 12 (dollars) | True, by Euler | True - it is
SENTENCE_END = r"(?i)(?<!\.)[.!?](?:\s|$)| \([a-z]{2}|(?<=rue|lse|yes|\Wno)(?:[,:]| [-–—]) "


def said_answer(closing: str) -> str | None:
    """The value or word after the last "the answer is" or "Answer:"; None if a sentence follows."""
    *before, tail = re.split(ANSWER_IS, closing)
    if not before or re.search(r"(?i)\bif\b[^.!?\n]*$", before[-1]):
        return None
    # Markup goes, and the label of an option: (c) 12.
    line = re.sub(r"^\([A-Za-z]\) |\\?\$|\\[()[\]]|\*\*|\\\\$", "", tail.split("\n")[0])
    said = re.split(SENTENCE_END, f" {line}")[0].strip(" .,;:'\"`“”")
    last = said.rpartition(" is ")[2]  # "the area is 12": 12
    for each in filter(None, (said, last)):
        if each.isalpha() or not re.search("[A-Za-z]{3,}", re.sub(NO_VARIABLE, "", each)):
            return each
    return None


@lru_cache(maxsize=4096)  # Several completions have the same reference.
def parse_values(text: str, units: bool, limit_s: int | None, whole: bool = False) -> list:
    """The values that Math-Verify finds in a text: sympy's, and as text.

    `units`: letters at the end are a unit, and no value. `whole`: only if LaTeX can read all of it.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0)
    latex = replace(latex, normalization_config=replace(latex.normalization_config, units=units))
    kinds = (latex,) if whole else (latex, ExprExtractionConfig())
    fallback = "no_fallback" if whole else "first_match"
    for pattern, spelling in LATEX:
        text = re.sub(pattern, spelling, text)
    text = re.sub(UNITS, "", text) if units else text
    return parse(text, kinds, fallback, parsing_timeout=limit_s)


def as_text(value: str | float) -> str:
    """A reference as text; a number is written out: 27.0 as 27, 5e-05 as 0.00005."""
    if isinstance(value, str) or type(value) is int:
        return str(value)
    if type(value) is float and math.isfinite(value):
        return f"{Decimal(repr(value)).normalize():f}"
    raise TypeError(f"must be text or a number, got {value!r:.80}")


# ---- Letters: the patterns read what `plain` returns ---------------------------------------------

FONTS = rf"\\(?:(?:text|math)[a-z]*|operatorname|mbox|bm|boldsymbol)\b|{INVISIBLE}"
SPACES = r"\\[ ,;:!]|\\q?quad\b|~|\s"
LABEL = r"[(\[]?([A-J](?:\).*|[)\].]+(?: .*)?)?:?)"  # C | (C) | C) 12 | C. none of these
LINE = rf"(?:.*(?:[.!?:#] ?|\b(?i:so|thus|hence|therefore),? ))?{LABEL}"  # So C.
SAID = (  # The answer is (C) | the closest option would be C | 答案是C | 【答案】C
    r"(?i:\banswer\b|(?:correct|right|best|closest) (?:option|choice|letter)|答案|正确选项)"
    r"(?i:[ \n:是为】]| is| (?:would|must|should) be| option| choice| letter)*"
    r"[(\[]*([A-J])(?![A-Za-z0-9'’∞]|[(\[]\w| ?[=^_+*/])"
)
OTHER = (  # C or D | C) 1, D) 2 | A. 1 B. 2 C. 3
    r"(.)[)\].:]* ?(?:(?:[,/&、和或]|and|or|also) ?)+[(\[]?(?!\1)[A-J]\b"
    r"|(.).*(?<![\w(\[])[(\[]?(?!\2)[A-J][)\]:]|A\..*B\..*C\b"
)


def reference_letter(answer: str) -> str | None:
    """The letter that a reference is: C, (C), C) 12. None: e, a number, and C. Lisbon, a name."""
    text = re.sub(INTRO, "", plain(re.sub(BOX, "", answer)))
    return read_letter(text) if re.match(r"[(\[]?[A-J](?:[)\]] \w|[)\].]*$)", text) else None


def read_letter(box: str) -> str | None:
    """The option letter A-J that the content of a box names, or None; two letters name none."""
    text = re.sub(INTRO, "", plain(box))
    text = re.sub(r"^[(\[]?[a-j]", lambda match: match[0].upper(), text)
    found = re.fullmatch(LABEL, text)
    return found and one_letter(found[1])


def one_letter(text: str) -> str | None:
    """The letter that a text begins with, or None if it names another: "C) or D"."""
    return None if re.match(OTHER, text) else text[0]


def said_letter(closing: str) -> str | None:
    """The letter of the last "the answer is (C)", or of the last line; two letters name none."""
    lines = [plain(line) for line in closing.split("\n") if line.strip()]
    text = "\n".join(lines)
    if said := [*re.finditer(SAID, text)]:
        return one_letter(re.split(r"[.!?] (?!.*[B-J]\. )|\n", text[said[-1].start(1) :])[0])
    letters = [found and one_letter(found[1]) for found in (re.fullmatch(LINE, x) for x in lines)]
    return letters[-1] if len({*letters} - {None}) == 1 else None  # several: a list of options


def plain(text: str) -> str:
    """A text without its markup, in one line."""
    text = unicodedata.normalize("NFKC", text).replace("。", ".")
    text = re.sub(rf"{FONTS}|\\(?:left|right)\b|\\[()[\]]|[{{}}$*`\"]", "", text)
    return re.sub(rf"(?:{SPACES})+", " ", text).strip(" \\")


# ---- Many completions ----------------------------------------------------------------------------


class Verifier(contextlib.AbstractContextManager):
    """Worker processes that grade. They start at once. Use as a context manager.

    Args:
        num_workers: processes that grade at the same time.
        timeout_s: CPU seconds that one answer may take; default: 0.8, for a reward function 10.
        reward: "path/to/file.py:function" replaces the verifier. From a completion and an example,
            its row as attributes, the function makes a number in [0, 1].

    Raises RewardError if the reward function cannot be loaded.
    """

    def __init__(
        self, num_workers: int = 1, timeout_s: float | None = None, reward: str | None = None
    ):
        self.timeout_s = timeout_s or (REWARD_TIMEOUT_S if reward else TIMEOUT_S)
        self.reward = reward
        options = [str(self.timeout_s), reward] if reward else [str(self.timeout_s)]
        self.workers = [_Worker(options) for _ in range(num_workers)]
        if reward:  # A bad one is refused now, not after the first rollout.
            for worker in self.workers:
                worker.wait_until_ready()

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.end()

    def score(self, completions: Sequence[str], references: Sequence[str | dict]) -> list[float]:
        """Which completions are right: (N,), (N,) -> (N,) verdicts, true or false.

        With a reward function the references are the examples' rows, as dicts, the verdicts its
        numbers. Raises RewardError if grading fails.
        """
        return [graded.correct for graded in self.grade(completions, references)]

    def grade(self, completions: Sequence[str], references: Sequence[str | dict]) -> list[Grade]:
        """Like `score`, but each `Grade` also has the answer that was read, and `ungraded`."""
        pairs = list(zip(completions, references, strict=True))
        free = list(self.workers)  # There are as many threads, so each finds one.

        def work(pair: tuple[str, str | dict]) -> Grade:
            worker = free.pop()
            try:
                return worker.grade(pair, self.timeout_s + WAITING_S)
            finally:
                free.append(worker)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(work, pairs))  # After an error, or Ctrl-C, it cancels the rest.


class _Worker:
    """A process that grades answers. When it dies, a new one takes its place."""

    def __init__(self, options: list[str]):
        self.options = options
        self._start()

    def _start(self) -> None:
        self.ready = False
        # A fresh Python: forking is unsafe with CUDA, and spawning imports torch, vLLM, ... again.
        self.pipe, worker_end = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(worker_end.fileno()), *self.options],
            # In 2 GiB of address space numpy has no room for the threads of many cores.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[worker_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # What a reward function prints goes to stderr.
            process_group=0,  # Ctrl-C in a terminal does not reach it.
        )
        worker_end.close()

    def wait_until_ready(self) -> None:
        """Raises EOFError if the worker died while it started: that is no wrong answer."""
        if not self.ready and (error := self.pipe.recv()):
            raise RewardError(error)
        self.ready = True

    def grade(self, pair: tuple[str, str | dict], clock_s: float) -> Grade:
        self.wait_until_ready()
        try:
            self.pipe.send(pair)
            if not self.pipe.poll(clock_s):
                raise TimeoutError  # an OSError
            reply = self.pipe.recv()
        except (EOFError, OSError):  # It died of this answer, or waits for too long.
            self.end()
            self._start()
            return UNGRADED
        if isinstance(reply, str):
            raise RewardError(f"{', '.join(self.options[1:]) or 'the verifier'}, {reply}")
        return Grade(*reply)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # It ends with all that it started.
        self.process.wait()
        self.pipe.close()


def load_reward(reward: str) -> Callable[[str, dict], Grade]:
    """The function that "path/to/file.py:function" names, made to return a Grade."""
    path, _, name = reward.rpartition(":")
    sys.path.append(sys.path.pop(0))  # Our folder comes last: `import evaluate` is not ours.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # It may import its neighbours.
    function = runpy.run_path(path).get(name) if path else None
    if not callable(function):
        raise RewardError("no such function; expected path/to/file.py:function")

    def grade_row(completion: str, row: dict) -> Grade:
        value = float(function(completion, types.SimpleNamespace(**row)))
        if not 0 <= value <= 1:
            raise ValueError(f"{name} returned {value}, which is not in [0, 1]")
        return Grade(value, None)

    return grade_row


def _reply(grader: Callable, pair: tuple[str, str | dict], timeout_s: float) -> tuple | str:
    """The grade of a completion, or why grading failed."""
    signal.setitimer(signal.ITIMER_PROF, timeout_s)  # After so much CPU time SIGPROF ends us.
    try:
        return tuple(grader(*pair))
    except (MemoryError, RecursionError):
        return tuple(UNGRADED)
    except Exception as error:  # The reward function raised, or a reference is no text.
        if isinstance(error, BrokenPipeError) and sys.stdout is sys.__stdout__:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  Nobody reads it.
            return _reply(grader, pair, timeout_s)
        row = pair[1].get("id") if isinstance(pair[1], dict) else pair[1]
        return f"row {row!r}:\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(pipe: Connection, timeout_s: float, reward: str | None = None) -> None:
    """Grade what comes through the pipe, until the trainer ends; without a reward, in a fork."""
    terminated = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))  # Only SIGKILL ends us.
    try:
        grader = load_reward(reward) if reward else grade
    except (Exception, SystemExit) as error:
        why = "" if isinstance(error, RewardError | OSError) else f"\n{traceback.format_exc()}"
        return pipe.send(f"{reward} cannot be loaded: {error}{why}")
    if not reward:
        logging.disable(logging.CRITICAL)  # Math-Verify warns of every answer it cannot read.
        for answer in ("1", r"\frac{1}{2}", "0.5x", r"(3, \sqrt{2})"):
            grade(f"so it is {answer}", "1")  # The first answers are slow: they fill caches.
            grade(rf"\boxed{{{answer}}}", "2")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_CAP, MEMORY_CAP))
    with contextlib.suppress(EOFError, ConnectionError):  # The trainer has ended.
        pipe.send(None)  # We are ready.
        while not reward and (fork := os.fork()):  # A fork grades: a new one costs nothing.
            if os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) != -signal.SIGPROF:
                return  # The trainer has ended, or will start us again.
            pipe.send(tuple(UNGRADED))
        while True:
            pair, asked, reply = pipe.recv(), os.getpid(), None
            while reply is None or terminated:  # SIGTERM also hit its subprocesses: call it again.
                terminated.clear()
                reply = _reply(grader, pair, timeout_s)
            if os.getpid() != asked:  # The reward function forked, and this is its child.
                os._exit(0)
            pipe.send(reply)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]), *sys.argv[3:])
