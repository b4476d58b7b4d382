"""The problems of docs/study/plan7.md: real ones from others' files, the rest from templates.

    python -m real.problems --source data/others --output runs/sixth/data

The source holds addsub.json, singleeq.json and svamp.json, as in
github.com/kojima-takeshi188/zero_shot_cot.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from arguments import one_line_errors
from data import Example, InputError, derive_seed, write_rows
from verify import as_text

import tyro

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo")
THINGS = ("apples", "books", "coins", "cards", "eggs")
THINGS += ("flowers", "keys", "letters", "pens", "shells")

# The question | the equation. c = a + b, p = a * b.
ONE_STEP = """
{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now? \
| {a} + {b}
There are {a} {t} on a table and {b} {t} in a box. How many {t} are there in all? \
| {a} + {b}
{n} had {c} {t} and gave {b} of them to {m}. How many {t} does {n} have left? \
| {c} - {b}
{n} has {c} {t} and {m} has {b}. How many more {t} does {n} have than {m}? \
| {c} - {b}
{n} fills {a} boxes with {b} {t} each. How many {t} are in the boxes? \
| {a} * {b}
{n} shares {p} {t} among {b} friends. How many {t} does each friend get? \
| {p} / {b}"""
TWO_STEPS = """
{n} has {a} {t}. {m} gives {n} {b} more, and {n} loses {d} of them. How many {t} does {n} have \
now? | {a} + {b} - {d}
There are {a} {t} on a table, {b} in a box and {d} on the floor. How many {t} are there in all? \
| {a} + {b} + {d}
{n} fills {a} boxes with {b} {t} each and has {d} {t} left over. How many {t} are there in all? \
| {a} * {b} + {d}
{n} buys {a} packs of {b} {t} and gives {d} {t} to {m}. How many {t} does {n} keep? \
| {a} * {b} - {d}
{n} has {p} {t}, shares them among {b} friends, and {m} gets {d} more. How many {t} does {m}, one \
of the friends, have? | {p} / {b} + {d}
{n} had {e} {t}, gave {a} to {m} and {b} to a teacher. How many {t} does {n} have left? \
| {e} - {a} - {b}
{n} has {a} {t} and {m} has {b} more than {n}. How many {t} do they have together? \
| {a} + {a} + {b}
{m} has {b} times as many {t} as {n}, who has {a}. How many more {t} does {m} have than {n}? \
| {a} * {b} - {a}"""


def easy_numbers(rng: random.Random, product: bool) -> tuple[int, int]:
    largest = 5 if product else 9
    return rng.randint(2, largest), rng.randint(2, largest)


def middle_numbers(rng: random.Random, product: bool) -> tuple[int, int]:
    if product:
        return rng.randint(3, 9), rng.randint(2, 9)
    return rng.randint(5, 20), rng.randint(5, 20)


def two_step_numbers(rng: random.Random, product: bool) -> tuple[int, int]:
    largest = 9 if product else 30
    return rng.randint(2, largest), rng.randint(2, largest)


def generate(templates: str, numbers, seed: int, seen: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield (question, equation, answer): no question that was `seen`."""
    rng = random.Random(seed)
    lines = [re.split(r"\s*\|\s*", line) for line in templates.strip().split("\n")]
    while True:
        question, left = rng.choice(lines)
        a, b = numbers(rng, "*" in left or "/" in left)
        d = rng.randint(2, 12)
        if "- {d}" in left and d >= (a * b if "*" in left else a + b):
            continue
        n, m = rng.sample(NAMES, 2)
        fields = {"n": n, "m": m, "t": rng.choice(THINGS), "a": a, "b": b, "c": a + b, "d": d}
        fields |= {"p": a * b, "e": a + b + d}
        question, left = question.format(**fields), left.format(**fields)
        if question not in seen:
            seen.add(question)
            answer = str(round(eval(left)))  # of our own digits
            yield question, f"{left} = {answer}", answer


def row(id: str, question: str, line: str, answer: str, source: str) -> dict:
    solution = f"{line}\nThe answer is \\boxed{{{answer}}}."
    return Example(id, question, solution, answer, source).columns


def real_problems(source: Path, *names: str) -> list[dict]:
    """Rows of the files whose equation gives the answer; the same question counts once.

    They are the fourth study's, in its order.
    """
    rows = {}
    for name in names:
        for item in json.loads((source / f"{name}.json").read_text()):
            if name == "svamp":
                question = f"{item['Body'].strip()} {item['Question']}"
                equation, answer = item["Equation"], item["Answer"]
            else:
                question = item["sQuestion"]
                [equation], [answer] = item["lEquations"], item["lSolutions"]
            answer = as_text(float(answer))
            equation = re.sub(r"^[xX] *= *|(?<=\d)\.0(?!\d)", "", equation).strip()
            if "=" not in equation:  # without x: less its outer brackets
                equation = re.sub(r"^\((.*)\)$", r"\1", equation).strip() + f" = {answer}"
            sides = equation.replace("X", "x").split("=")
            if not re.fullmatch(r"[\dxX.+*/()= -]+", equation) or len(sides) != 2:
                continue
            try:
                left, right = (eval(side, {"x": float(answer)}) for side in sides)
            except (SyntaxError, TypeError):
                continue
            if abs(left - right) < 1e-6:
                question = re.sub(r"\s+([.?,])", r"\1", " ".join(question.split()))
                start = "".join(re.findall("[a-z]", question.lower()))[:30]
                key = (start, *re.findall(r"\d+", question))  # some files word the end otherwise
                rows.setdefault(key, row(f"{name}-{len(rows)}", question, equation, answer, name))
    return sorted(rows.values(), key=lambda row: derive_seed("plan4", row["question"]))


def main(source: Path, output: Path = Path("runs/sixth/data")) -> None:
    """Write the sets. Raises InputError if a file is missing."""
    if not (source / "svamp.json").exists():
        raise InputError(f"{source}: there is no svamp.json; see python -m real.problems --help")
    real, seen = real_problems(source, "addsub", "singleeq", "svamp"), set()
    kinds = {
        "easy": generate(ONE_STEP, easy_numbers, 0, seen),
        "middle": generate(ONE_STEP, middle_numbers, 1, seen),
        "two": generate(TWO_STEPS, two_step_numbers, 2, seen),
    }

    def take(kind: str, count: int, name: str) -> list[dict]:
        found = itertools.islice(kinds[kind], count)
        return [row(f"{name}-{n}", *fields, kind) for n, fields in enumerate(found)]

    sets = {"real_held": real[:256]}
    sets |= {f"{kind}_held": take(kind, 128, f"{kind}-held") for kind in ("easy", "middle")}
    trained = real[256 : 256 + 640]
    sets["train"] = trained + take("easy", 640, "easy") + take("middle", 640, "middle")
    sets["base"] = take("easy", 1500, "base-easy") + take("two", 1500, "base-two")
    for name, rows in sets.items():
        write_rows(rows, output / f"{name}.jsonl")
        print(f"{len(rows):,} rows -> {output / name}.jsonl")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, prog="python -m real.problems", description=__doc__)
