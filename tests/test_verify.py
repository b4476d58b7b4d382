r"""What counts as right: a table of answers, hostile input, and the pool's promises."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest

import verify
from conftest import ROOT
from verify import (
    RewardError,
    Verifier,
    boxes,
    extract,
    grade,
    is_correct,
    last_boxes,
    read_letter,
    said_letter,
)

# ---- letters: what stands in the box -> the letter it names

C_FORMS = r"""
C|(C)|C.|\text{C}|\text{(C)}|\textbf{C}|\textbf{(C)}|\mathbf{C}|\mathrm{C}|\mathsf{C}|\mathit{C}
\boldsymbol{C}|\operatorname{C}|\mbox{C}|\bf C|\rm{C}|$C$|{C}|[C]|C)|C:|C,|c|(c)|c.|**C**
\left(C\right)|\;C\;|\ C|~C|C) 12|C. 12|C: 12|(C) 12|C 12|C, 12|\text{C) } 12|\textbf{(C)}\ 12
\textbf{(C) }12|(C)\,12|\text{C. } \frac{1}{2}|(C) -5|C) -5|C.\ x=-5|\text{(C) 5 apples}
C) 5 apples|C) \sqrt{2}|(C)\quad 3\pi|C) I and III|C) A circle|C. none of the above|12 (C)
\underline{C}|\emph{C}|\color{red}{C}|\color{red} C|\textcolor{blue}{(C)}|\Large C|\huge{C}
（C）|Ｃ|C。|C：12|`C`|C\ |C \frac{1}{2}|\text{C is correct}|(C) \approx 3
\text{12 (C)}|3\sqrt{2}\ \textbf{(C)}|Option C|\text{Option C}|\text{option (C)}|\text{Choice C}
\text{The answer is C}|\text{The correct answer is (C)}|\text{Answer: C}|\text{answer C}
\text{The correct option is C}|\text{(C) }12\text{ km}"""

NOT_C = r"""
A|B|D|(B)|\text{D}|AC|CD|ABC|A, C|C, D|A and C|C and D|\text{A and C}|\text{C or D}|C/D|C D|C & D
A or C|(A)(C)|(A), (C)|A) C)|C) D)|C) A|(C) 1 (D) 2|C. 1 D. 2|\text{(C) or (D)}|\text{both C and D}
C^2|C_1|C+1|C-1|C - 1|C = 12|C=12|2C|C!|\sqrt{C}|\frac{C}{2}|\frac{A}{C}|f(C)|C(x)|12|x|K
C \approx 3|C \le 5|C\geq 5|C\ \neq D|C ≈ 3|C \cup D|C \times 2|C \in S
\text{Cat}|\text{None}|c^2|12C|C1|\emptyset|?|\text{C, D}|A,B,C,D,E|\{C, D\}|C\text{ and }D
\text{not (C)}|(C) is wrong|C, b|(C), (b)|\text{not C}|\text{C is wrong}|C?|(C)?|\text{C or b}
\neg C|C \text{ is incorrect}|\text{isn't (C)}|\text{never (C)}|\text{anything but (C)}
\text{(C) or (b)}|C; b|C / b|a, b|a and b|\text{no (C)}|\overline{C}|\sim C|C^c
\text{either C or A}|\lnot(C)|\text{C?}|C \text{ and } c|\text{(C) and (c)}|(C)\ (c)
\text{wrong: (C)}|\text{except (C)}|\text{Answer: not C}|\text{C, not}|\cancel{C}|\cancel{(C)}
\not C|C \to A|C, B|\text{C is not right}|C=A|(C)=(A)|\text{C isn't}|C\text{ is false}|(C)–A
(C) vs A|\text{(C) through A}|\text{All but C}|\text{C is impossible}|(C)^c|\text{no: C}"""

C_FORMS, NOT_C = (forms.strip().replace("\n", "|").split("|") for forms in (C_FORMS, NOT_C))


@pytest.mark.parametrize("form", C_FORMS)
def test_a_box_names_the_letter(form):
    assert read_letter(form) == "C"
    assert is_correct(rf"Some reasoning with $A$ and $B$, so $\boxed{{{form}}}$.", "C")
    assert not is_correct(rf"\boxed{{{form}}}", "D")


@pytest.mark.parametrize("form", NOT_C)
def test_a_box_does_not_name_the_letter(form):
    assert read_letter(form) != "C"
    assert not is_correct(rf"\boxed{{{form}}}", "C")


def test_all_letters_from_a_to_j_are_options():
    for letter in "ABCDEFGHIJ":
        for form in (letter, f"({letter})", rf"\text{{{letter}}}", f"{letter}) 12", letter.lower()):
            assert read_letter(form) == letter
            assert is_correct(rf"\boxed{{{form}}}", letter)
        assert is_correct(f"So the answer is ({letter}).", letter)
        assert is_correct(f"**Answer: {letter}**", letter)


SAYS_C = r"""
**C**|C|(C)|（C）|#### C|**C.**|c|(c)|$\boldsymbol{C}$|Option C|Choice (C).|ANS: C|Ans C
The answer is C.|the answer is (C)|The correct answer is **C**.|Final answer: (C) 12|Answer: c
the answer is c.|the answer is (c) 12|<answer>C</answer>|<answer> C </answer>|The answer is:⏎⏎C
The correct answer is:⏎⏎**C) 12**|the correct option is **C**.|The correct choice is therefore C.
The answer is $\text{(C)}$.|The answer is 12.5, which is option C.|Answer:C|The answer choice is C
The answer is C and I am sure.|The answer I get is C.|The answer is C – as shown.
Therefore C.|Thus, (C).|So it is C|Hence option C.|So (C) is correct.|Option C is correct.
C is the correct answer.|C is correct, as 12 is even.|答案是 C|答案是C。|答案：C|故选C。
The answer is B. Wait, 2 is odd. Actually the answer is C|The answer is B. Actually, C.
Therefore B.⏎No, the correct option is C.|The answer is C. Option B is wrong.
The answer is C. The answer is not B.|Is it C or D? The answer is C."""

SAYS_NOTHING = r"""
Because C is larger than B|C is a letter|A box has 3 sides. Therefore A circle has one.|I think
A circle|So A circle is it.|The answer follows. A box has 3 sides|The answer is: A box|Answer: I am
The answer is not C.|The answer is C or D.|The answer is C and D|The answer is A and B
The answer is (C), (D)|C, D|B⏎A C|The answer is C + 1|The answer is C = 12
The answer is C \approx 3|The answer is Carol.|C = 3
The answer is 12C.|The answer is C's age.|So C and D are equal.|Therefore C is a right angle.
Therefore the midpoint is C.|The answer is unclear. C is a letter|The answer is c + 1|answer: c, d
the answer is a|The right answers be b.|No answer as 1 = 2⏎A: 3
Option C is incorrect.|The correct answer C is wrong.|The answer is \boxed{C
Choices A, B and C are too small.|So the answer is f(x).|Angle C is right.
The answer is C because A and B are too small.|The answer is C, B is too small.
The answer is on line C.|The answer to part C is 12.|The answer differs from C.
The answer is less than C.|If the answer is C, then 1 = 2.|The answer isn't C.
The answer can't be C.|The answer is never C.|答案不是C|Is the answer C? No.|The wrong answer is C.
the answer is C; A|C⏎A|The answer isn’t (C).|The answer could not be C.
I doubt that the answer is C.|The answer is C? No, it is not.|The answer is C or B.
The answer is hardly C.|The answer is anything but C.|The answer is everything except C.
No way the answer is C.|The answer is unlikely to be C.|It would be wrong to say the answer is C.
The incorrect answer is C.|The answer is C, b|The answer is C / A|The answer is C, or possibly A.
Answer: C. Answer: not C.|The answer is C. No, the answer is not C.|Answer: C⏎A|**C**⏎⏎**A**
(C)⏎(A)|The answer is C? Maybe.|Which answer is right, C?|Suppose the answer is C.
The answer is C is false.|The answer C is out.|The answer C has been excluded.
正确答案不是 (C)|答案是C吗？不是|The answer is not (B) but not (C) either.|The answer is neither C.
The answer would be C if 2 were odd.|The false answer is C.|The answer is no longer C.
The answer is far from C.|Cross out answer C.|Eliminate answer C.|C is not the answer.
C isn't correct.|Therefore C is not correct.|C is the answer? No.|So C is incorrect.
Thus C is wrong.|The answer lies between C and A.|The answer is C and also A.
C common wrong answer is C.|Without C the answer is unclear.|The answer is: not C
The correct option is not option C.|The answer cannot be C."""


def closings(table: str) -> list[str]:
    return table.strip().replace("\n", "|").replace("⏎", "\n").split("|")


@pytest.mark.parametrize("closing", closings(SAYS_C))
def test_a_closing_without_a_box_names_the_letter(closing):
    assert said_letter(closing) == "C"
    assert is_correct(f"Let $A$ be 3, so that $B = 4$.\n\n{closing}", "C")
    assert not is_correct(closing, "B")


@pytest.mark.parametrize("closing", closings(SAYS_NOTHING))
def test_a_closing_without_a_box_names_no_letter(closing):
    assert said_letter(closing) is None


@pytest.mark.parametrize("box", ["A circle", r"\text{A square}", r"A\text{ box}", "I think so"])
def test_an_article_and_a_pronoun_are_no_letters_in_a_box(box):
    assert read_letter(box) is None


@pytest.mark.parametrize(
    "reference", ["C", "(C)", "C.", "[C]", "$C$", r"\text{(C)}", r"\textbf{C}", r"\boxed{C}", " C "]
)
def test_the_reference_may_be_written_in_its_own_way(reference):
    assert is_correct(r"\boxed{C}", reference)
    assert not is_correct(r"\boxed{D}", reference)


# ---- everything: completion, reference, right?

RIGHT = [
    # numbers
    (r"\boxed{12}", "12"),
    (r"$\boxed{12}$.", "12"),
    (r"\boxed{ 12 }", "12"),
    (r"\boxed{12.0}", "12"),
    (r"\boxed{-3}", "-3"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{10,\!000}", "10000"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{18\text{ dollars}}", "18"),
    (r"\boxed{12\ \text{cm}}", "12"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1/2}", r"\frac{1}{2}"),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
    (r"\boxed{3\frac{1}{2}}", r"\frac{7}{2}"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{033}", "33"),
    (r"\boxed{12.}", "12"),
    (r"\boxed{12\ }", "12"),
    (r"\boxed{12\,}", "12"),
    (r"\boxed{12**}", "12"),
    (r"\boxed{**12**.}", "12"),
    (r"\boxed{`12`}", "12"),
    (r"\boxed{3 1/2}", "3.5"),
    (r"\boxed{-3\ 1/2}", "-3.5"),
    (r"\boxed{7/2}", "3 1/2"),
    (r"\boxed{90°}", "90"),
    (r"\boxed{90°}", r"90^\circ"),
    (r"\boxed{90}", "90°"),
    (r"\boxed{1\,000\,000}", "1000000"),
    (r"\boxed{1\ 000~000}", "1,000,000"),
    (r"\boxed{113}", "113"),
    # expressions
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{2\pi}", r"2\pi"),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2"),
    (r"\boxed{1+x}", "x+1"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{y = 2x + 3}", "y=2x+3"),
    (r"\boxed{\frac{\pi}{2}}", r"\frac{\pi}{2}"),
    (r"\boxed{3-2i}", "3-2i"),
    (r"\boxed{e^{2}}", "e^2"),
    (r"\boxed{e^{1}}", "e"),
    (r"\boxed{i}", "i"),
    (r"\boxed{\tfrac{14}{3}}", r"\frac{14}{3}"),
    # tuples, sets, intervals, matrices
    (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"\boxed{1, 2}", "1,2"),
    (r"\boxed{[-2,7]}", r"x \in [-2,7]"),
    (r"\boxed{(-\infty, 3)}", r"(-\infty,3)"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # words
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{Evelyn}", r"\text{Evelyn}"),
    ("The answer is 3 1/2.", "3.5"),
    ("So it takes $3 1/2$ hours.", "3.5"),
    ("The angle is 90°.", r"90^\circ"),
    (r"The answer is $1\,000\,000$.", "1000000"),
    ("The answer is `12`.", "12"),
    # several boxes for several values
    (r"\boxed{3}, \boxed{4}", "3,4"),
    (r"so $\boxed{4}$ and $\boxed{3}$.", "3, 4"),
    (r"\(x_1 = \boxed{3}\), \(x_2 = \boxed{4}\), or \(x_3=\boxed{5}\)", r"\{3,4,5\}"),
    (r"$\boxed{3}\text{ or }\boxed{4}$", r"3 \text{ and } 4"),
    (r"First \boxed{3}, then \boxed{3, 4}", "3,4"),
    (r"\boxed{3}, \boxed{4}", "4"),
    # small numbers, and characters that are not ASCII
    (r"\boxed{0.00005}", "5e-05"),
    (r"\boxed{5e-05}", "0.00005"),
    (r"\boxed{5 \times 10^{-5}}", "5e-05"),
    ("The answer is 1.5e-3.", "0.0015"),
    (r"\boxed{1.5E3}", "1500"),
    (r"\boxed{１２}", "12"),
    (r"\boxed{½}", "0.5"),
    (r"\boxed{3½}", "3.5"),
    (r"\boxed{2√3}", r"2\sqrt{3}"),
    (r"\boxed{√(x+1)}", r"\sqrt{x+1}"),
    (r"\boxed{x²+1}", "x^2+1"),
    (r"\boxed{10⁻²}", "0.01"),
    (r"\boxed{−5}", "-5"),
    ("The answer is −5.", "-5"),
    (r"\boxed{1 000}", "1000"),
    ("\\boxed{12\N{NARROW NO-BREAK SPACE}345}", "12345"),
    (r"\boxed{1~\frac59}", r"\frac{14}{9}"),
    # equations whose left side is a name, words, another base
    (r"\boxed{f'(x) = 2x}", "2x"),
    (r"\boxed{x_{\max} = 3}", "3"),
    (r"\boxed{\left(x, y\right) = (1, 2)}", "(1,2)"),
    (r"\boxed{\angle ABC = 30^\circ}", "30"),
    (r"\boxed{\text{Area} = 5}", "5"),
    (r"\boxed{x + 1 = 6}", "x+1=6"),
    (r"\boxed{P(X=2) = 3}", "3"),
    (r"\boxed{a:b = 1:2}", "1:2"),
    (r"\boxed{2x + 3 = y}", "y=2x+3"),
    (r"\boxed{\sum_{n=1}^{5} n}", "15"),
    (r"\boxed{\text{No solution}.}", "no solution"),
    (r"\boxed{1100_{2}}", "1100_2"),
    (r"\boxed{x \geq 3}", r"x \ge 3"),
    (r"\boxed{π}", r"\pi"),
    # where the answer stands
    (r"\boxed{4} and \boxed{}", "4"),
    (r"\boxed{4}. \boxed{ }", "4"),
    (r"The answer is 4. \boxed{}", "4"),
    (r"First \boxed{3}, no: \boxed{4}", "4"),
    (r"\boxed{4} and then \boxed{5", "4"),
    (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{\sqrt{2}}{2}"),
    (r"\fbox{7}", "7"),
    (r"\boxed {7}", "7"),
    (r"<think>\boxed{3}</think>It is \boxed{7}.", "7"),
    (r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", "2"),
    (r"<think> so \boxed{7}, and", "7"),
    ("5 + 7 = 12", "12"),
    ("The answer is 12.", "12"),
    ("The answer is $12$.", "12"),
    ("So the final answer is 3/4.", "0.75"),
    ("#### 18", "18"),
    ("A: 18", "18"),
    ("She makes 9 * 2 = $18", "18"),
    (r"Hence $x = \frac{1}{2}$.", "0.5"),
    (r"\[x = 12\]", "12"),
    ("the answer is (C)", "C"),
    ("The answer is C. Statement A is correct.", "C"),
    ("The answer is (C). None of A, B, D is correct.", "C"),
    ("The correct answer is:\n\n(C) 12", "C"),
    ("Answer: C - Paris", "C"),
    ("The answer is 12, i.e. option C", "C"),
    ("we get 12.\n\n**12**", "12"),
    ("The best choice is C.", "C"),
    ("Thus, C is the right choice.", "C"),
    ("The answer is C.", "C"),
    ("The correct answer is **C**.", "C"),
    ("Answer: C", "C"),
    ("Final answer: (C) 12", "C"),
]

WRONG = [
    (r"\boxed{13}", "12"),
    (r"\boxed{}", "12"),
    ("", "12"),
    (" \n ", "12"),
    (r"\boxed{12}, or rather \boxed{13}", "12"),
    (r"The answer is 12, hence \boxed{13}", "12"),
    (r"\boxed{-12}", "12"),
    (r"\boxed{1.2}", "12"),
    (r"\boxed{12}", "-12"),
    (r"\boxed{\frac{2}{1}}", r"\frac{1}{2}"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{[1,2]}", "(1,2)"),
    (r"\boxed{x+2}", "x+1"),
    (r"\boxed{\text{Bob}}", r"\text{Evelyn}"),
    (r"\boxed{\text{A square}}", r"\text{A circle}"),
    (r"\boxed{C}", "12"),
    (r"\boxed{12}", "C"),
    (r"<think>\boxed{7}</think>It is \boxed{3}.", "7"),
    (r"<think>\boxed{7}</think>I do not know.", "7"),
    ("12 " + "and more words " * 30, "12"),
    ("The answer is (B)", "C"),
    ("C is a letter", "C"),
    (r"The answer is C, that is \boxed{B}", "C"),
    ("Because C is larger than B", "C"),
    ("It is not true that C is correct.", "C"),
    ("The answer is 25°C", "C"),
    ("The answer is P(C) = 0.5", "C"),
    ("The answer is C(x) = 3", "C"),
    ("The answer is neither C nor B", "C"),
    (r"\boxed{x^2\,300}", "x^{2300}"),
    (r"\boxed{\text{no solution}}", "0"),
    (r"\boxed{12, 13}", "12"),
    (r"\boxed{3 1/2}", r"\frac{31}{2}"),
    (r"\boxed{3 1/2}", "1.5"),
    (r"\boxed{1\,00}", "100"),
    (r"First \boxed{3}, no: \boxed{4}", "3,4"),
    (r"\boxed{3} \boxed{4}", "3,4"),
    (r"\boxed{3}, \boxed{5}", "3,4"),
    (r"\boxed{3}, \boxed{4}, \boxed{5}", "3,4"),
    (r"\boxed{3}, \boxed{4}", "3"),
    (r"\boxed{3}, \boxed{4}", "(3,4)"),
    (r"\boxed{2\sqrt{3}}", r"3\sqrt{2}"),
    (r"\boxed{on}", "no"),
    (r"\boxed{\text{silent}}", "listen"),
    (r"\boxed{\text{Obb}}", r"\text{Bob}"),
    (r"\boxed{x+1=6}", "6"),
    (r"\boxed{2x = 6}", "6"),
    (r"\boxed{\sqrt{x} = 6}", "6"),
    (r"\boxed{0=0}", "0"),
    (r"\boxed{\geq 2}", "2"),
    (r"\boxed{< 2}", "2"),
    (r"\boxed{100_2}", "100"),
    (r"\boxed{1, 2, \dots, 10}", "10"),
    (r"\boxed{1~\frac59}", r"\frac{5}{9}"),
    (r"\boxed{5e-05}", "0.00006"),
    (r"\boxed{2020 100}", "2020100"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right(completion, answer):
    assert is_correct(completion, answer)


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong(completion, answer):
    assert not is_correct(completion, answer)


def test_the_table_is_as_long_as_it_claims():
    assert len(C_FORMS) + len(NOT_C) + len(RIGHT) + len(WRONG) >= 150


def test_the_last_complete_box_is_found_through_nested_and_escaped_braces():
    assert last_boxes(r"\boxed{1} \boxed{\{a\}_{b_{c}}} x")[-1] == r"\{a\}_{b_{c}}"
    assert last_boxes(r"\boxed{1} \boxed{2")[-1] == "1"
    assert last_boxes("no box") == []


def test_what_a_completion_answers_is_read_without_algebra():
    for completion, reference, extracted in [
        (r"\boxed{A}</think> so \boxed{\text{(C)}}", "(C)", "C"),
        (r"\boxed{A}</think> The answer is C.", "C", "C"),
        (r"\boxed{12}", "C", "12"),
        (r"\boxed{\frac{1}{2}}", "0.5", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4}", "5", "4"),
        ("I cannot say", "C", None),
    ]:
        assert extract(completion, reference) == extracted
        assert grade(completion, reference).extracted == extracted
    assert extract(r"\boxed{9^{9^{9^{9}}}}", "1") == "9^{9^{9^{9}}}"
    assert extract("so it is 12", "12") is None  # algebra reads it


def test_boxes_are_found_in_time_that_grows_with_the_text_alone():
    assert boxes("\\boxed{" * 100_000 + "}") == [(700_000, 700_000)]
    assert boxes(r"\boxed{1\fbox{2}}\boxed{3}") == [(7, 16), (14, 15), (24, 25)]


# ---- hostile completions

ENDLESS = r"\boxed{\sum_{n=1}^\infty \frac{\log(n)^7}{n^\pi+\sqrt{n}}}"  # only the deadline ends it
HOSTILE = [
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{(10^{10})^{(10^{10})}}",
    r"\boxed{123456789^{987654321}}",
    r"\boxed{1000000!}",
    r"\boxed{(10^9)!}",
    r"\boxed{((((5!)!)!)!)!}",
    r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}",
    r"\boxed{\sum_{i=1}^{10^{10}} i^{i}}",
    r"\boxed{\prod_{i=1}^{10^{9}} i}",
    r"\boxed{\sum_{i=1}^{10^6}\sum_{j=1}^{10^6} i^j}",
    r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}",
    r"\boxed{\int \int \int \sin(\cos(\tan(e^{x^y}))) dx dy dz}",
    r"\boxed{\lim_{n\to\infty} \sum_{k=1}^{n} \frac{1}{k^{k^k}}}",
    r"\boxed{(x+y+z+w)^{500}}",
    r"\boxed{(1+x)^{10^{8}}}",
    r"\boxed{\left((x+1)^{999}\right)^{999}}",
    r"\boxed{x^{x^{x^{x^{x^{x^{x^{x}}}}}}}}",
    r"\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}",
    r"\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}",
    r"\boxed{" + r"\sqrt{" * 800 + "2" + "}" * 800 + "}",
    r"\boxed{" + r"\frac{1}{1+" * 400 + "1" + "}" * 400 + "}",
    r"\boxed{" + "1+" * 5000 + "1}",
    r"\boxed{" + "9" * 100_000 + "}",
    r"\boxed{" + "9" * 5_000 + "^{" + "9" * 5_000 + "}}",
    r"\boxed{" + "x" * 20_000 + "}",
    r"\boxed{" + r"\left(" * 1000 + "}",
    r"\boxed{" + r"\begin{pmatrix}" * 200 + "}",
    r"\boxed{" * 5000,
    r"\boxed{" * 2000 + "1" + "}" * 2000,
    r"\boxed{1}" * 20_000 + r"\boxed{2}",
    "1" * 200_000,
    "=" * 100_000,
    "$" * 50_001,
    "the answer is " * 20_000,
    ("1," * 50_000) + r"\boxed{" + "1," * 5_000 + "1}",
    r"\boxed{\{" + ",".join(map(str, range(3000))) + r"\}}",
    r"\boxed{\begin{pmatrix}" + r"\\".join(["&".join(["1"] * 40)] * 40) + r"\end{pmatrix}^{99}}",
    r"\boxed{\sin(\sin(\sin(\sin(10^{10^{10}}))))}",
    r"\boxed{\log_{2}(3^{4^{5^{6}}})}",
    r"\boxed{0.1^{-99999999}}",
    "\x00\x01\x02\\boxed{\x00}",
    "\ud800\\boxed{\udfff}",
    "<think>" * 10_000 + r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{\text{" + "a" * 50_000 + "}}",
    r"\boxed{e^{e^{e^{e^{79}}}}}",
    ENDLESS,
    r"\boxed{(" + "+".join(f"x_{{{n}}}" for n in range(60)) + r")^{10^{9}}}",
]


@pytest.mark.parametrize(
    "huge",
    HOSTILE[:12] + HOSTILE[13:15] + HOSTILE[16:19] + HOSTILE[20:24] + HOSTILE[40:43] + HOSTILE[-1:],
)
def test_a_huge_answer_costs_no_algebra_and_is_right_only_as_the_reference_is_written(
    huge, monkeypatch
):
    monkeypatch.setattr(verify, "verify", lambda *args, **kwargs: pytest.fail("algebra"))
    assert not is_correct(huge, "7")
    assert is_correct(huge, last_boxes(huge)[-1])


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2^{100}", "1267650600228229401496703205376"),
        ("20!", "2432902008176640000"),
        (r"\binom{52}{5}", "2598960"),
        ("(x+1)^3", "x^3+3x^2+3x+1"),
        (r"\sum_{i=1}^{2024} i", "2049300"),
        (r"\sum_{n=1}^{\infty} \frac{1}{2^n}", "1"),
        ("e^{x^5}e", "e^{x^5+1}"),
        (r"2^{2^{10}}", r"4^{512}"),
    ],
)
def test_an_answer_of_human_size_is_worked_out(answer, reference):
    assert is_correct(rf"\boxed{{{answer}}}", reference)


def test_hostile_completions_end_at_the_deadline_as_wrong_and_harm_no_neighbour():
    assert len(set(HOSTILE)) >= 40
    deadline = 1.0
    completions, answers = [], []
    for completion in HOSTILE:
        completions += [completion, r"\boxed{42}"]
        answers += ["7", "42"]
    with Verifier(num_workers=2, timeout_s=deadline) as verifier:
        verifier.score([r"\boxed{1}"] * 2, ["1"] * 2)  # both have started
        started = time.monotonic()
        verdicts = verifier.score(completions, answers)
        seconds = time.monotonic() - started
    assert verdicts == [False, True] * len(HOSTILE)
    assert seconds < deadline * len(HOSTILE)  # two workers: half of that, and slack


def test_results_come_in_the_order_of_the_inputs():
    numbers = [str(n % 10) for n in range(203)]
    with Verifier(num_workers=3, timeout_s=10) as verifier:
        verdicts = verifier.score([rf"\boxed{{{n}}}" for n in numbers], ["3"] * 203)
        assert verdicts == [n == "3" for n in numbers]
        assert verifier.score([], []) == []
        assert verifier.score([r"\boxed{1}"], ["1"]) == [True]
        with pytest.raises(ValueError):
            verifier.score(["a", "b"], ["a"])


def processes(verifier: Verifier) -> list[psutil.Process]:
    return [psutil.Process(worker.process.pid) for worker in verifier.workers]


def test_a_worker_that_is_killed_costs_one_answer_and_is_replaced():
    with Verifier(num_workers=1, timeout_s=30) as verifier:
        assert verifier.score([r"\boxed{1}"], ["1"]) == [True]
        processes(verifier)[0].kill()
        assert verifier.score([r"\boxed{1}"] * 3, ["1"] * 3) == [False, True, True]


def test_a_worker_that_cannot_start_is_an_error_not_a_wrong_answer():
    with Verifier(num_workers=2) as verifier:
        for process in processes(verifier):
            process.kill()
        with pytest.raises(ChildProcessError, match="while it started"):
            verifier.score([r"\boxed{1}"], ["1"])


def test_ctrl_c_does_not_reach_the_workers_and_none_is_left_behind():
    with Verifier(num_workers=2) as verifier:
        verifier.score([r"\boxed{1}"] * 2, ["1"] * 2)
        family = processes(verifier)
        for process in family:
            assert os.getpgid(process.pid) != os.getpgid(0)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        assert verifier.score([r"\boxed{1}"] * 8, ["1"] * 8) == [True] * 8
        assert processes(verifier) == family
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_memory_of_a_worker_is_capped():
    with Verifier(num_workers=1, timeout_s=5) as verifier:
        verifier.score([r"\boxed{1}"], ["1"])
        assert processes(verifier)[0].rlimit(psutil.RLIMIT_AS) == (2 * 2**30, 2 * 2**30)


def test_a_loaded_host_makes_no_right_answer_wrong():
    with Verifier(num_workers=1, timeout_s=0.5) as verifier:
        verifier.score([r"\boxed{1}"], ["1"])
        (worker,) = processes(verifier)
        worker.suspend()  # as if it got no core
        threading.Timer(2, worker.resume).start()
        assert verifier.score([r"\boxed{\frac{1}{2}}"] * 3, ["0.5"] * 3) == [True] * 3
        assert worker.is_running()
        assert verifier.score([ENDLESS, r"\boxed{2}"], ["7", "2"]) == [False, True]
        assert not worker.is_running()


def test_a_trainer_that_is_killed_leaves_no_worker_behind():
    completions = [ENDLESS, r"\boxed{7}"] * 4
    script = f"""
from verify import Verifier
with Verifier(2, timeout_s=0.5) as verifier:
    print(verifier.score(["1"], ["1"]), flush=True)
    verifier.score({completions}, ["7"] * 8)
"""
    with psutil.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout.readline() == "[True]\n"
        family = trainer.children(recursive=True)
        trainer.kill()
    assert len(family) == 2
    assert not psutil.wait_procs(family, timeout=30)[1]


# ---- reward functions

REWARDS = """
import os
import signal
import threading
import subprocess
import time
from dataclasses import dataclass

import neighbour

@dataclass
class Point:
    x: float

def half(completion, example):
    print(completion)  # must not end up in the verifier's pipe
    read = subprocess.run(["cat"], capture_output=True).stdout
    return Point(0.5).x if example.answer == neighbour.ANSWER and not read else 0

def echo(completion, example):
    return eval(completion)

def hostile(completion, example):
    return {
        "good": lambda: 1,
        "endless": lambda: [0 for _ in iter(int, 1)],
        "memory": lambda: len(bytearray(4 << 30)),
        "depth": lambda: hostile(completion, example),
        "exit": lambda: exit(3),
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "sleep": lambda: time.sleep(1000),
    }[completion]()

def start(completion, example):
    child = subprocess.Popen(["sleep", "1000"])
    with open(example.pid_file, "w") as file:
        file.write(str(child.pid))
    while True:
        pass
"""


@pytest.fixture
def rewards(tmp_path) -> str:
    """The path of a file with reward functions."""
    (tmp_path / "neighbour.py").write_text("ANSWER = 7")
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def test_a_reward_function_takes_the_place_of_the_verifier(rewards):
    rows = [{"id": n, "answer": n % 8} for n in range(32)]
    with Verifier(2, reward=f"{rewards}:half") as verifier:
        scores = verifier.score(["it is 7"] * 32, rows)
        assert scores == [0.5 if n % 8 == 7 else 0.0 for n in range(32)]
        assert {type(score) for score in scores} == {float}
    with Verifier(1, reward=f"{rewards}:echo") as verifier:
        values = ["True", "0", "1.0", "0.25", "__import__('numpy').float32(0.5)"]
        assert verifier.score(values, rows[:5]) == [1, 0, 1, 0.25, 0.5]


def test_a_reward_function_imports_its_own_modules_before_ours(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "evaluate.py").write_text("THEIRS = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    code = "import evaluate, verify\ndef f(completion, example): return evaluate.THEIRS"
    (tmp_path / "own.py").write_text(code)
    with Verifier(1, reward=f"{tmp_path}/own.py:f") as verifier:
        assert verifier.score(["a"], [{}]) == [1]


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "f", "FileNotFoundError: .*rewards.py"),
        ("def f(): pass", "g", "expected file.py:function.* no function 'g'"),
        ("f = 1", "f", "no function 'f'"),
        ("import os\nimport nothing_like_it", "f", r"line 2(.*\n)*ModuleNotFoundError: No module"),
        ("def f(:", "f", "line 1(.*\n)*SyntaxError"),
        ("exit(2)", "f", "line 1(.*\n)*SystemExit: 2"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded_is_refused_at_once_with_its_traceback(
    source, function, message, tmp_path
):
    path = tmp_path / "rewards.py"
    if source:
        path.write_text(source)
    with pytest.raises(RewardError, match=message):
        Verifier(2, reward=f"{path}:{function}")
    children = psutil.Process().children()
    assert not [child for child in children if f"{path}:{function}" in child.cmdline()]


FAILURES = [
    ("1 / 0", r"rewards.py:echo, row 'q1':(.*\n)*.*line 21, in echo(.*\n)*ZeroDivisionError"),
    ("example.tests", "AttributeError: .* has no attribute 'tests'"),
    ("2", r"echo returned 2, which is no number in \[0, 1\]"),
    ("-0.1", "returned -0.1"),
    ("float('nan')", "returned nan"),
    ("None", "returned None"),
    ("'1' * 10**6", "returned '1{1,80}, which"),
]


def test_a_reward_function_that_fails_ends_the_scoring_with_its_traceback(rewards):
    rows = [{"id": f"q{n}"} for n in range(100)]
    with Verifier(2, reward=f"{rewards}:echo") as verifier:
        for completion, message in FAILURES:
            with pytest.raises(RewardError, match=message):
                verifier.score(["1", completion] + ["1"] * 98, rows)
        assert verifier.score(["1"], rows[:1]) == [1.0]


def test_a_reward_function_that_hangs_or_crashes_gives_0(rewards):
    kinds = ["good", "endless", "good", "memory", "depth", "good", "exit", "crash", "good"]
    with Verifier(1, timeout_s=0.5, reward=f"{rewards}:hostile") as verifier:
        scores = verifier.score(kinds, [{"id": kind} for kind in kinds])
    assert scores == [float(kind == "good") for kind in kinds]


def test_a_reward_function_that_waits_forever_ends_by_the_clock(rewards, monkeypatch):
    monkeypatch.setattr(verify, "WAITING_S", 1)
    with Verifier(1, timeout_s=0.5, reward=f"{rewards}:hostile") as verifier:
        assert verifier.score(["sleep", "good"], [{"id": 1}, {"id": 2}]) == [0, 1]


def test_what_a_reward_function_started_ends_with_its_worker(rewards, tmp_path):
    row = {"id": 1, "pid_file": str(tmp_path / "pid")}
    with Verifier(1, timeout_s=0.5, reward=f"{rewards}:start") as verifier:
        assert verifier.score(["x"], [row]) == [0.0]
        pid = int((tmp_path / "pid").read_text())
        ended = lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"  # noqa: E731
        deadline = time.monotonic() + 20
        while not ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ended()


# ---- docs/verdicts.md

PAGE = (ROOT / "docs" / "verdicts.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_pages_tables_say_what_the_verdicts_are():
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \|", PAGE, re.MULTILINE)
    assert len(rows) >= 12
    for box, reference, verdict in rows:
        assert is_correct(rf"\boxed{{{box}}}", reference) == (verdict == "right"), (box, reference)


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
    class GRPOTrainer:
        def __init__(self, model, reward_funcs, train_dataset):
            self.reward, self.columns = reward_funcs, train_dataset

        def train(self):
            texts = [r"\boxed{7}", r"\boxed{8}"]
            chats = [[{"role": "assistant", "content": text}] for text in texts]
            for completions in (texts, chats):
                rewards = self.reward(prompts=["?"] * 2, completions=completions, **self.columns)
                assert rewards == [1.0, 0.0]

    trl = types.ModuleType("trl")
    trl.GRPOTrainer = GRPOTrainer
    monkeypatch.setitem(sys.modules, "trl", trl)
    exec(PYTHON[1], {"dataset": {"answer": ["7", "7"], "id": [1, 2]}})
