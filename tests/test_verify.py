r"""What counts as right: tables of answers, hostile input, and the pool's promises."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import verify
from conftest import ROOT, SHARED, needs_shared, slow
from data import read_rows
from stand_in import GradeHere
from verify import UNGRADED, Grade, RewardError, Verifier, is_correct, read_letter, said_letter

import psutil
import pytest


def table(cases: str) -> list[str]:
    """The cases of a table: `|` or a new line ends one, ⏎ is a new line within it."""
    return [case.replace("⏎", "\n") for case in cases.strip().replace("\n", "|").split("|")]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    """With a limit that no answer here reaches, on a slow processor either."""
    with Verifier(2, timeout_s=60) as verifier:
        yield verifier


def each_form(cases: str) -> pytest.MarkDecorator:
    """For every case of a table."""
    return pytest.mark.parametrize("form", table(cases))


def each_verdict(cases: str) -> pytest.MarkDecorator:
    """For every case as what is judged, =, reference; ≠ stands where it is wrong."""
    rows = [re.split(" ([=≠])> ", case.strip()) for case in table(cases)]
    return pytest.mark.parametrize(("said", "verdict", "reference"), rows)


@each_form(r"""
C|[C]|(c)|c.|**C**|（C）|C。|C\ |~C|\boldsymbol{C}|\operatorname{C}|\mbox{C}|\left(C\right)|C) 12
\text{The correct option is (C)}|Option C|\text{Answer: C}|\text{The correct answer is (C)}
\text{(C) A and B}|C) f(A) = B|C. Ann F. Dee""")
def test_a_box_names_the_letter(form):
    assert read_letter(form) == "C"
    assert is_correct(rf"Some reasoning with $A$ and $B$, so $\boxed{{{form}}}$.", "C")
    assert not is_correct(rf"\boxed{{{form}}}", "D")


@each_form(r"""
A, C|\text{C or D}|C/D|(A)(C)|(C) 1 (D) 2|f(C)|\text{Cat}|\neg C|\text{not C}|(C) 1. (D) 2""")
def test_a_box_does_not_name_the_letter(form):
    assert read_letter(form) != "C"
    assert not is_correct(rf"\boxed{{{form}}}", "C")


@each_form(r"""
**C**|#### C|Answer: C - Paris|Therefore C.|答案是 C|【答案】C|The closest option would be (C).
The answer is C. Option B is wrong.|Therefore B.⏎No, the correct option is C.
The answer is C because A and B are too small.|The correct option letter is C
The correct letter is C.|正确选项为C|答案是C。选项B错误|The result: C|The answer is C, (C) Lisbon.
The answer is C as (C) is even|The answer is C. (B) is wrong.|选项 B 也不正确。【答案】C|C. Lisbon
C)⏎C) 12|C)400|So (C)$5$.|The answer is B. Wait, 2 is odd. Actually the answer is C
Answer: C⏎⏎Why:⏎A) is wrong.⏎B) is wrong.""")
def test_a_closing_without_a_box_names_the_letter(form):
    assert said_letter(form) == "C"
    assert is_correct(f"Let $A$ be 3, so that $B = 4$.\n\n{form}", "C")
    assert not is_correct(form, "B")


@each_form(r"""
The answer is C / A|the answer is a|The answer is C + 1|The answer is C's age.
The answer is \boxed{C|The answer is not C.|C is not the answer.|A. 3⏎C. 4|(C) or (D)
The answer is C) red or D) blue.|I. 3⏎II. 4|The answer is Carol.|C, D|B⏎A C|C⏎A
The answer is on line C.|The answer is 25°C|Answer: C∞v|答案不是C|答案：C、D|【答案】: C和D
【答案】A. 甲乙 B. 甲丙 C. 乙丁 D. 丙丁|The answer is A. 1 B. 2 C. 3|The answer is C(5,2).
The answer is C and D.""")
def test_a_closing_without_a_box_names_no_letter(form):
    assert said_letter(form) is None


def test_a_closing_after_a_box_that_names_no_letter_is_read():
    for box in ("12", "C, D", r"\text{all of them}"):
        said = rf"The answer is B. The mass is $\boxed{{{box}}}$ kg."
        assert not is_correct(said, "C") and not is_correct(said, "B")
        assert is_correct(f"{said} The answer is (C).", "C")
    assert verify.grade(r"It is \boxed{D}. The answer is C.", "C").extracted == "D"


def test_all_letters_from_a_to_j_are_options():
    for letter in "ABCDEFGHIJ":
        assert all(read_letter(form) == letter for form in (letter, letter.lower()))
        assert is_correct(rf"\boxed{{{letter}}}", letter)
        assert is_correct(f"So the answer is ({letter}).", letter)
        assert verify.reference_letter(rf"$\text{{({letter})}}$.") == letter
        assert verify.reference_letter(letter.lower()) is None  # e and i are numbers
    for article in ("A circle", r"\text{A square}", r"A\text{ box}", "I think so"):
        assert read_letter(article) is None


@each_verdict(r"""
12 => 12 | 13 ≠> 12 | C ≠> 12 | 12 ≠> C | 1\,00 ≠> 100 | 0.5 => \frac{1}{2}
\frac{2}{1} ≠> \frac{1}{2} | 35.0\% => 35 | 35 => 35.0\% | 7.2\% => 0.072 | 7.2\% ≠> 72
6.63\times 10^{-34} => 6.63e-34 | 1.6\times 10^{-19} ≠> 1.61\times 10^{-19}
0 ≠> 1.6\times 10^{-19} | q=0.0000012 ≠> 0.0000014 | x^2+2x+1 => (x+1)^2 | x+2 ≠> x+1
1100_{2} => 1100_2 | x=5 => 5 | \{2, 1\} => \{1,2\} | (2,1) ≠> (1,2) | [1,2] ≠> (1,2)
√7 => \sqrt{7} | 5√3 + 6 ≠> 6 | 3 + sqrt(5), 3 - sqrt(5) ≠> 3 | 3x² => 3x^2 | 12^{\text{th}} => 12
12^{\mathrm{th}} => 12 | \begin{cases} 3 & x>0 \\ 5 & x<0 \end{cases} ≠> 5 | \min(-\infty, -4) ≠> 5
\infty ≠> -\infty | 5 ≠> \infty | 2000 calories. => 2000 | 2 dozen ≠> 2 | 2 thirds ≠> 2
3 halves ≠> 3 | 2 and a bit ≠> 2 | 2 sin x ≠> 2 | 4.00001 ≠> 4 | x>2.5 ≠> x<2.5 | 2.5 ≠> x \ne 2.5
y=2.5 ≠> x=2.5 | x = 4.99999999999 => 5 | 12million => 12000000 | 11 ≠> 8+3t | -4.9 ≠> -4.9 t
5g ≠> 5h | 8 m/s => 8 | \sqrt{2}+\sqrt{3} => \sqrt{5+2\sqrt{6}}
\frac{m^2}{5}+\frac{m}{5} => \dfrac {m^2} 5 + \dfrac m 5 | 7 ≠> \lg 7 | \foo{7} => \foo {7}
\ln 5 => \log 5 | 2{,}500 + x => x+2500 | M = 2{,}500 => 2500 | B=18,\!204,\!511 => 18204511
2{,}50 ≠> 250 | 3\binom{6}{2} => 45 | 3\binom{6}{2} ≠> 18 | 1, 3, \ldots, 2n-1 ≠> 1, 2, \ldots, n
6.1 × 10⁻³ => 0.0061 | 3\text{ million} ≠> 3 | 2 thousand => 2000 | True ≠> False
\text{Evelyn} => Evelyn | €45 => 45 | i ≠> -i
\frac{2^{1005}-1}{5\cdot 2^{1006}} ≠> \frac{2^{1005}+1}{5 \cdot 2^{1006}}
\frac13-\frac{1}{7\cdot 3^{1020}} ≠> \frac13+\frac{1}{7\cdot 3^{1020}}
8.00 \times 10^{12} \, \text{km} => 8e12 | 2^3 \times 10^4 => 80000 | \frac12 \times 10^4 => 5000
0.0003334 ≠> \frac{1}{3000} | b) 12 => b | (b) 12 => b | c) 12 ≠> b | 12 cm^2 => 12
12 => 12 square meters | 5 => 5 ft | 3\text{ hundred} ≠> 3""")
def test_a_value_in_a_box_is_compared_with_the_reference(said, verdict, reference):
    assert is_correct(rf"So it is $\boxed{{{said}}}$.", reference) == (verdict == "=")


@each_verdict(r"""
\boxed{4} and \boxed{} => 4 | \boxed{4} and then \boxed{5 => 4
<think>\boxed{7}</think>It is \boxed{3}. ≠> 7 | <think>\boxed{7}</think>I do not know. ≠> 7
<think> so \boxed{7}, and => 7 | \boxed{3}, \boxed{4} => 4 | \boxed{3}, \boxed{4} ≠> 3,4
5 + 7 = 12 => 12 | The answer is 4. \boxed{} => 4 | The answer is C, that is \boxed{B} ≠> C
#### 18 => 18 | So the final answer is 3/4. => 0.75 | The answer is True. ≠> False
Answer: (4, -9) ≠> 9 | **Answer:** 7, -3 => -3,7 | Answer: 8 - 3i ≠> 8
**Final Answer:**⏎\[⏎\text{Answer: } 14⏎\] => 14 | Final Answer:⏎$$ 8 \, \text{cm} $$ => 8
\[⏎8 \text{ cm}⏎\] => 8 | The answer is 2.5 × 10^(-4). => 0.00025
The answer is 3.7x10^5 m/s. => 370000 | The answer is (c) 18. => 18 | Answer: \foo{7} => \foo {7}
Answer: m+n = 256+37 = 293 ≠> 256 | The answer is True, by Euler. => True
If it is odd, the answer is True. ≠> True | The answer is True or False. ≠> True | True. => True
The answer is not valid. ≠> valid | \boxed{C} => (C) | \boxed{D} ≠> (C) | It is $-4+9i.$ => -4+9i
<think>a</think>\boxed{1}<think>b</think>\boxed{2} => 2 | ### Answer:⏎⏎The area is $50$. => 50
The answer is False. A counter-example is 2. => False | The answer is True if x > 0. ≠> True
So the answer is true - it holds. => True | Answer: 6 apples and 2 pears ≠> 8
Answer: 12x - 35 ≠> 12 | Hence \[19x - 4x = 15x.\] => 15x
Answer: \begin{pmatrix} -2 \\ 0 \end{pmatrix} => \begin{pmatrix} -2 \\ 0 \end{pmatrix}
In short, the answer is True: the map is continuous. => True
it is greater than 1.07 x 10^-24 kg·m/s ≠> 1e-24 | it is 1.07 x 10^-24 kg·m/s => 1.07e-24
Answer: 12 (dollars) => 12 | the answer is no: it is odd. => No | Answer: sqrt(5) => \sqrt{5}
Answer: sqrt(5) ≠> 5 | The argument is **valid**. ≠> valid
### Answer:⏎⏎The argument is **valid**. => valid
### Answer:⏎⏎The solution to $\frac{x}{2} = 3$ is $x = 6$. => 6""")
def test_a_completion_is_read_where_its_answer_stands(said, verdict, reference):
    assert is_correct(said, reference) == (verdict == "=")


@each_verdict(r"""
C => C) 12 | C => (C) Lisbon | C => Option C | C => Answer: (C) | D ≠> C) 12 | 72 => #### 72
72 => The answer is 72. | 7 ≠> #### 72 | C ≠> C. Lisbon | A ≠> (A) or (B)
pricing ≠> Option pricing""")
def test_a_reference_that_holds_more_than_the_answer_is_read_like_a_box(said, verdict, reference):
    assert is_correct(rf"\boxed{{{said}}}", reference) == (verdict == "=")


def test_invisible_characters_change_no_verdict():
    for mark in "\u200b\ufeff\u200e\u2060\u00ad":
        for answer in ("27", "C", r"\sqrt{2}", "Evelyn"):
            assert is_correct(rf"So \boxed{{{mark}{answer}}}.", answer)
            assert is_correct(rf"So \boxed{{{answer}}}.", f"{answer}{mark}")


def test_the_last_complete_box_is_found_in_time_that_grows_with_the_text_alone():
    assert verify.extract(r"\boxed{1} \boxed{\{a\}_{b_{c}}} x", "1") == r"\{a\}_{b_{c}}"
    assert verify.extract("no box", "1") is None
    for answer in ("12", "C"):  # too far from the end
        assert not is_correct(f"The answer is {answer}.\n\n" + "more words " * 30, answer)
    long = rf"\boxed{{{'0+' * 500}7}}"  # is compared with the reference to the letter alone
    assert not is_correct(long, "7") and is_correct(long, "0+" * 500 + "7")
    assert verify.boxes(r"\boxed{1\fbox{2}}\boxed{3}") == [(7, 16), (14, 15), (24, 25)]
    assert verify.boxes("\\boxed{" * 100_000 + "}") == [(700_000, 700_000)]


@needs_shared
def test_the_cases_in_which_real_answers_were_graded_wrong(verifier):
    rows = [row for _, row in read_rows(str(SHARED / "data" / "verdicts.jsonl"))]
    pairs = [(row["completion"], row["reference"]) for row in rows]
    verdicts = verifier.score(*zip(*pairs, strict=True))
    assert not [row for row, right in zip(rows, verdicts, strict=True) if right != row["right"]]


STUMBLES = [
    case.split(" / ")
    for case in table(r"""
\sum_{n=1}^{\infty} 2 / 0.5|\lceil \infty \rceil / \infty|\arctan \frac{1}{0} / \frac{1}{2}
\sum_{k=1}^{\infty} \frac{\lfloor \sqrt{k} \rfloor}{k^3} / 2|\max(\frac{1}{0}, 1) / 1|1.5e300!! / 1
\lceil \pi^{10^{400}} \rceil / 1""")
]


def test_an_answer_or_a_reference_at_which_the_algebra_raises_is_wrong_and_counted(verifier):
    assert not is_correct(*STUMBLES[0])
    for box, reference in STUMBLES:
        boxed, swapped = rf"\boxed{{{box}}}", rf"\boxed{{{reference}}}"
        grades = verifier.grade([boxed, boxed, swapped], [reference, box, box])
        assert grades[:2] == [Grade(False, box, ungraded=True), Grade(True, box)]
        assert not grades[2].correct
    assert verifier.grade([r"\boxed{0.5}"], [STUMBLES[0][0]])[0].ungraded


ENDLESS = r"\boxed{\sum_{n=1}^\infty \frac{\log(n)^7}{n^\pi+\sqrt{n}}}"  # only the deadline ends it
HUGE = table(r"9^{9^{9^{9}}}|(10^9)!|(x+y+z+w)^{500}|\int_0^1 x^{x^{x^{x}}} dx|0.1^{-99999999}")
HOSTILE = [rf"\boxed{{{box}}}" for box in (*HUGE, "(" * 450 + "1" + ")" * 450, "1+" * 5000 + "1")]
HOSTILE += [r"\boxed{" * 2000 + "1" + "}" * 2000, "<think>" * 10_000 + HOSTILE[0]]
HOSTILE += ["1" * 200_000, "$" * 50_001, "the answer is " * 20_000, "\ud800\\boxed{\x00}", ENDLESS]


@slow
def test_hostile_completions_end_at_the_deadline_as_wrong_and_harm_no_neighbour():
    deadline = 1.0
    completions = [text for hostile in HOSTILE for text in (hostile, r"\boxed{42}")]
    with Verifier(num_workers=2, timeout_s=deadline) as verifier:
        verifier.score([r"\boxed{1}"] * 2, ["1"] * 2)  # both have started
        grades = verifier.grade(completions, ["7", "42"] * len(HOSTILE))
    assert [grade.correct for grade in grades] == [False, True] * len(HOSTILE)
    assert not any(grade.ungraded for grade in grades[1::2])
    assert grades[-2] == UNGRADED  # ENDLESS


def test_is_correct_refuses_a_thread_in_which_math_verify_would_fail():
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="use a Verifier"):
        pool.submit(is_correct, r"\boxed{1}", "1.0").result()


def test_results_come_in_the_order_of_the_inputs(verifier):
    numbers = [str(n % 10) for n in range(103)]
    verdicts = verifier.score([rf"\boxed{{{n}}}" for n in numbers], ["3"] * 103)
    assert verdicts == [n == "3" for n in numbers]
    assert verifier.score([], []) == []
    with pytest.raises(ValueError):
        verifier.score(["a", "b"], ["a"])


def test_a_number_is_a_reference_and_what_is_no_text_either_is_an_error(verifier):
    boxed = [rf"\boxed{{{answer}}}" for answer in (1, 27, "0.00005", "7")]
    assert verify.as_text(10**40 + 1) == str(10**40 + 1)
    assert is_correct(r"\boxed{6.63\times 10^{24}}", 6.63e24) and verify.as_text(100.0) == "100"
    assert verifier.score(boxed, [1, 27.0, 5e-5, "7"]) == [True] * 4
    for bad in (None, ["1"], b"1", True, float("nan")):
        with pytest.raises(RewardError, match="must be text or a number"):
            verifier.score(boxed, ["1", "27", bad, "7"])
    with pytest.raises(RewardError, match=r"the verifier, row '7'"):
        verifier.score([r"\boxed{1}", 7], ["1", "7"])  # a completion is text
    assert is_correct(boxed[0], 1)
    assert not is_correct("It is 7.", "") and not is_correct(boxed[3], "")


def test_a_worker_outlives_signals_and_is_replaced_when_it_ends_and_none_is_left_behind():
    one, two, right = r"\boxed{1}", r"\boxed{2}", Grade(True, "2")
    limits = [Verifier(0, *given).timeout_s for given in ((), (None, "r.py:f"), (3, "r.py:f"))]
    assert limits == [0.8, 10, 3] and UNGRADED == (False, None, True)
    with Verifier(num_workers=1, timeout_s=1) as verifier:
        assert verifier.score([one], ["1"]) == [True]
        parent = psutil.Process(verifier.workers[0].process.pid)
        family = [parent, *parent.children()]  # A fork of it grades.
        for process in family:
            assert os.getpgid(process.pid) != os.getpgid(0)  # Ctrl-C does not reach it.
            process.send_signal(signal.SIGTERM)
        assert verifier.score([one] * 8, ["1"] * 8) == [True] * 8
        assert [parent, *parent.children()] == family
        assert family[1].rlimit(psutil.RLIMIT_AS) == (2 * 2**30, 2 * 2**30)
        assert verifier.grade([ENDLESS, two], ["7", "2"]) == [UNGRADED, right]
        assert parent.is_running() and not family[1].is_running()  # A new fork costs nothing.
        family += parent.children()
        family[-1].kill()
        assert verifier.grade([two] * 3, ["2"] * 3) == [UNGRADED, right, right]
        family.append(psutil.Process(verifier.workers[0].process.pid))
        family += family[-1].children()
    assert not psutil.wait_procs(family, timeout=60)[1]
    with Verifier(num_workers=1) as verifier:
        verifier.workers[0].process.kill()  # while it starts: this is no wrong answer
        with pytest.raises(EOFError):
            verifier.score([one], ["1"])


@slow
def test_a_trainer_that_is_killed_leaves_no_worker_behind():
    completions = [ENDLESS, r"\boxed{7}"] * 4
    script = f"""
from verify import Verifier
with Verifier(2, timeout_s=2) as verifier:
    print(verifier.score(["1"] * 2, ["1"] * 2), flush=True)  # both have begun
    verifier.score({completions}, ["7"] * 8)
"""
    command = [sys.executable, "-c", script]
    with psutil.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "[True, True]\n"
        family = trainer.children(recursive=True)
        trainer.kill()
    assert len(family) == 4
    assert not psutil.wait_procs(family, timeout=120)[1]


REWARDS = """
import os
import signal
import subprocess
import time

import evaluate  # not ours
import neighbour

def half(completion, example):
    print(completion, flush=True)
    read = subprocess.run(["cat"], capture_output=True).stdout
    assert not read and os.environ["OMP_NUM_THREADS"] == "1"  # many would fill its memory
    return 0.5 if example.answer == neighbour.ANSWER == evaluate.ANSWER else 0

def echo(completion, example):
    return eval(completion)

def hostile(completion, example):
    return {
        "good": lambda: 1,
        "endless": lambda: endless(example),
        "memory": lambda: len(bytearray(4 << 30)),
        "depth": lambda: hostile(completion, example),
        "exit": lambda: exit(3),
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "wait": lambda: time.sleep(0.5) or 1,
        "sleep": lambda: time.sleep(1000),
    }[completion]()

def forks(completion, example):
    os.fork()
    return int(completion)

def starts_a_program(completion, example, calls=[]):
    calls.append(completion)
    if len(calls) == 1:
        subprocess.run(["sleep", "1000"])
    return len(calls) == 2

def endless(example):
    with open(example.pid_file, "w") as file:
        file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
    while True:
        pass
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch) -> str:
    """The path of a file with reward functions."""
    (tmp_path / "installed").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # as cpu.py sets it on a host with 64 cores
    for path in ("neighbour.py", "installed/evaluate.py"):
        (tmp_path / path).write_text("ANSWER = 7")
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def test_a_reward_function_takes_the_verifier_s_place_with_its_modules_and_one_thread(
    rewards, capfd
):
    rows = [{"id": n, "answer": n % 8} for n in range(32)]
    with Verifier(2, reward=f"{rewards}:half") as verifier:
        assert verifier.score(["it is 7"] * 32, rows) == [0.5 * (n % 8 == 7) for n in range(32)]
    assert "7" not in capfd.readouterr().out  # what it prints is on stderr


def test_a_reward_function_may_print_what_nobody_reads(rewards):
    (read, write), stderr = os.pipe(), os.dup(2)
    os.close(read)
    os.dup2(write, 2)
    try:
        with Verifier(1, reward=f"{rewards}:half") as verifier:
            assert verifier.score(["it is 7"] * 2, [{"answer": 7}] * 2) == [0.5, 0.5]
    finally:
        os.dup2(stderr, 2)


def test_a_reward_function_that_forks_is_answered_once(rewards):
    values = [n % 2 for n in range(20)]
    with Verifier(1, reward=f"{rewards}:forks") as verifier:
        assert verifier.score([str(value) for value in values], [{}] * 20) == values


@pytest.mark.parametrize("source", [None, "f = 1", "import nothing_like_it", "exit(2)"])
def test_a_reward_function_that_cannot_be_loaded_is_refused_and_no_worker_is_left(source, tmp_path):
    path, before = tmp_path / "rewards.py", psutil.Process().children()
    if source:
        path.write_text(source)
    with pytest.raises(RewardError, match=r"rewards\.py") as refused:
        Verifier(2, reward=f"{path}:f")
    assert ("Traceback" in str(refused.value)) == (source not in (None, "f = 1"))
    started = [child for child in psutil.Process().children() if child not in before]
    assert not psutil.wait_procs(started, timeout=60)[1]


BROKEN = "(_ for _ in ()).throw(BrokenPipeError)"  # of a program that it has started


def test_a_reward_function_that_fails_ends_the_scoring_with_its_traceback(rewards):
    rows = [{"id": f"q{n}"} for n in range(100)]
    with Verifier(2, reward=f"{rewards}:echo") as verifier:
        for completion in ("1 / 0", "example.tests", "2", "-0.1", "float('nan')", "None", BROKEN):
            with pytest.raises(RewardError, match=r"rewards.py:echo, row 'q1':\nTraceback"):
                verifier.score(["1", completion] + ["1"] * 98, rows)
        with pytest.raises(RewardError, match=r"(?s)row '7':\nTraceback.*must be a mapping"):
            verifier.score(["1"], ["7"])  # an answer alone, not its row
        values = ["True", "0", "1.0", "0.25", "__import__('numpy').float32(0.5)"]
        assert verifier.score(values, rows[:5]) == [1, 0, 1, 0.25, 0.5]


def test_a_reward_function_that_computes_or_sleeps_too_long_or_crashes_gives_0(
    rewards, tmp_path, monkeypatch
):
    kinds = ["good", "endless", "wait", "memory", "depth", "exit", "good", "crash", "good"]
    row, good = {"pid_file": str(tmp_path / "pid")}, Grade(1.0, None)
    with Verifier(1, timeout_s=0.2, reward=f"{rewards}:hostile") as verifier:
        grades = [good if kind in ("good", "wait") else UNGRADED for kind in kinds]
        assert verifier.grade(kinds, [row] * len(kinds)) == grades  # To wait takes no CPU time.
        with monkeypatch.context() as patch:
            patch.setattr(verify, "WAITING_S", 0.5)
            assert verifier.grade(["sleep"], [row]) == [UNGRADED]
        assert verifier.grade(["good"], [row]) == [good]
    started = int((tmp_path / "pid").read_text())  # it ended with its worker
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie"


PAGE = (ROOT / "docs" / "verdicts.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_pages_tables_say_what_the_verdicts_are():
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \|", PAGE, re.MULTILINE)
    for box, reference, verdict in rows:
        assert is_correct(rf"\boxed{{{box}}}", reference) == (verdict == "right"), (box, reference)


def test_what_a_launcher_ends_while_an_answer_is_graded_is_graded_again(rewards):
    """DeepSpeed's sends SIGTERM to all that a rank has started, also by a reward function."""
    reward = f"{rewards}:starts_a_program"
    with Verifier(1, reward=reward) as verifier, ThreadPoolExecutor(1) as pool:
        scored = pool.submit(verifier.score, ["1"], [{}])
        worker = psutil.Process(verifier.workers[0].process.pid)
        while [child.cmdline() for child in worker.children()] != [["sleep", "1000"]]:
            time.sleep(0.01)
        for process in [worker, *worker.children()]:
            process.terminate()
        assert scored.result() == [1.0]


def test_the_pages_reward_functions_work(tmp_path):
    (tmp_path / "rewards.py").write_text(PYTHON[0])
    with Verifier(1, reward=f"{tmp_path}/rewards.py:exact_match") as verifier:
        row = {"id": 1, "answer": "7"}
        assert verifier.score(["So:\n7\n", "It is 7.", ""], [row] * 3) == [1, 0, 0]
    row["tests"] = ["assert double(2) == 4", "assert double(3) == 6"]
    codes = ["2 * x", "x + 2", "exit()"]
    completions = [f"```python\ndef double(x):\n    return {code}\n```" for code in codes]
    with Verifier(2, reward=f"{tmp_path}/rewards.py:pass_tests") as verifier:
        assert verifier.score([*completions, "no code"], [row] * 4) == [1, 0.5, 0, 0]


def test_the_pages_reward_for_other_trainers_works(monkeypatch):
    trl = Mock()
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setattr(verify, "Verifier", lambda **_: GradeHere())
    exec(PYTHON[1], {"dataset": None})
    is_right = trl.GRPOTrainer.call_args.kwargs["reward_funcs"]
    chat = [{"role": "assistant", "content": r"\boxed{7}"}]
    texts = [r"\boxed{8}, no: \boxed{7}", r"\boxed{8}", chat]
    assert is_right(completions=texts, answer=["7"] * 3, id=[1, 2, 3]) == [1, 0, 1]
