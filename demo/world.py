r"""The small world of the demo and its studies: arithmetic modulo 10, read from left to right.

Six tiers of problems, by their operators. Fine-tuning shows the first three. Of the others, `far`
is harder than all of them, and `keep` and `long` are skills that the model should not lose: `<` and
`>` (the smaller, the larger of two numbers), and longer chains of what it knows.

Two styles of solution. In `plain` each step is its result. In `scratch` a mark comes first, and
each step shows its work, two digits: the sum, the difference plus ten, the product, the last two of
the power, or the result of `<` and `>`.

    question  7+5*3      plain    7+5=2;2*3=6;\boxed{6}
                         scratch  @7+5:12=2;2*3:06=6;\boxed{6}

The model has seen both, `keep` and `long` in plain alone: it writes plain by habit.
"""

from collections.abc import Sequence

from data import Example

import numpy as np

TIERS = {  # operators (the last one is new, and always occurs), and how many a problem has
    "easy": ("+-", 3),
    "middle": ("+-*", 3),
    "hard": ("+-*^", 3),
    "far": ("+-*^", 5),
    "keep": ("<>", 3),
    "long": ("+-", 5),
}
TRAIN_MIX = {"easy": 0.5, "middle": 0.25, "hard": 0.25}  # what fine-tuning shows
GAIN, RETENTION = ("middle", "hard"), ("keep", "long")  # what is learnt, and what is never shown
NUM_HELDOUT = 48  # held-out problems of each tier
MAX_LENGTH, MAX_COMPLETION = 160, 128  # tokens


def make_question(tier: str, rng: np.random.Generator, taken: set[str]) -> str:
    """Draw a question of a tier that is not taken."""
    known, count = TIERS[tier]
    while True:
        operators = rng.choice(list(known), size=count)
        operators[rng.integers(count)] = known[-1]
        first, *digits = rng.integers(10, size=count + 1)
        steps = "".join(f"{o}{d}" for o, d in zip(operators, digits, strict=True))
        if (question := f"{first}{steps}") not in taken:
            return question


def solve(question: str, style: str, slip: tuple[int, int] | None = None) -> tuple[str, str]:
    """A question's solution, in a style, and its answer.

    With a slip (n, d) the last digit of step n is wrong, by d, and the rest follows from it.
    """
    value, steps = int(question[0]), "@" if style == "scratch" else ""
    for n, (operator, digit) in enumerate(zip(question[1::2], question[2::2], strict=True)):
        operand = int(digit)
        match operator:
            case "+":
                work = value + operand
            case "-":
                work = value - operand + 10
            case "*":
                work = value * operand
            case "^":
                work = value**operand % 100
            case "<":
                work = min(value, operand)
            case ">":
                work = max(value, operand)
        if slip and n == slip[0]:
            work += (work + slip[1]) % 10 - work % 10
        result = work % 10
        shown = f":{work:02}" if style == "scratch" else ""
        steps += f"{value}{operator}{operand}{shown}={result};"
        value = result
    return f"{steps}\\boxed{{{value}}}", str(value)


def make_examples(
    num_examples: int, mix: dict[str, float], rng: np.random.Generator, taken: set[str]
) -> list[Example]:
    """Draw problems, the tiers in the shares of `mix`; no question twice, none that is taken.

    Their solutions are in scratch.
    """
    examples = []
    tiers = [tier for tier, share in mix.items() for _ in range(round(share * num_examples))]
    for tier in rng.permutation(tiers):
        question = make_question(tier, rng, taken)
        taken.add(question)
        examples.append(
            Example(f"{tier}-{question}", question, *solve(question, "scratch"), str(tier))
        )
    return examples


def spoil(rows: Sequence[dict], rng: np.random.Generator) -> list[dict]:
    """The rows; a tenth of them, `spoiled`, has a wrong answer and a solution that leads to it."""
    spoiled = [row | {"spoiled": False} for row in rows]
    for n in rng.choice(len(rows), size=round(len(rows) / 10), replace=False):
        question, right = rows[n]["question"], rows[n]["answer"]
        wrong = right
        while wrong == right:  # a slip may not show in the end: times 0
            slip = int(rng.integers(len(question) // 2)), int(rng.integers(1, 10))
            solution, wrong = solve(question, "scratch", slip)
        spoiled[n] |= {"solution": solution, "answer": wrong, "spoiled": True}
    return spoiled
