"""The problems of docs/study/plan4.md: real ones from others' files, easy ones from templates.

    python -m real.problems --source data/others --output runs/real/data

The source holds addsub.json, singleeq.json, svamp.json and multiarith.json, as in
github.com/kojima-takeshi188/zero_shot_cot, and instructions.jsonl, human_eval of
github.com/yizhongw/self-instruct.
"""

import itertools
import json
import random
import re
from pathlib import Path

import tyro

from data import Example, InputError, derive_seed, write_rows
from run import one_line_errors
from verify import as_text

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo")
THINGS = "apples books coins cards eggs flowers keys letters pens shells"
# The question; what happened, in words (the base's style); the equation (the expert's).
TEMPLATES = """
{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?
| {n} gets {b} {t} more, so {n} has {c} {t} now. | {a} + {b}
There are {a} {t} on a table and {b} {t} in a box. How many {t} are there in all?
| Those on the table and those in the box are {c} {t} in all. | {a} + {b}
{n} had {c} {t} and gave {b} of them to {m}. How many {t} does {n} have left?
| {n} gave away {b} {t}, so {a} {t} are left. | {c} - {b}
{n} has {c} {t} and {m} has {b}. How many more {t} does {n} have than {m}?
| {n} has {a} {t} more than {m}. | {c} - {b}
{n} fills {a} boxes with {b} {t} each. How many {t} are in the boxes?
| Each box holds {b} {t}, so the boxes hold {p} {t}. | {a} * {b}
{n} shares {p} {t} among {b} friends. How many {t} does each friend get?
| Every friend gets {a} {t}. | {p} / {b}"""


def row(id: str, question: str, line: str, answer: str, source: str) -> dict:
    solution = f"{line}\nThe answer is \\boxed{{{answer}}}."
    return Example(id, question, solution, answer, source).columns


def easy_problems(seed: int):
    """Yield (question, the base's sentence, the expert's equation, answer): no question twice."""
    rng, seen = random.Random(seed), set()
    lines = TEMPLATES.strip().split("\n")
    templates = [" ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    while True:
        question, sentence, equation = re.split(r"\s*\| ", rng.choice(templates))
        largest = 5 if "*" in equation or "/" in equation else 9
        a, b = rng.randint(2, largest), rng.randint(2, largest)
        n, m = rng.sample(NAMES, 2)
        thing = rng.choice(THINGS.split())
        fields = {"n": n, "m": m, "t": thing, "a": a, "b": b, "c": a + b, "p": a * b}
        question = question.format(**fields)
        if question not in seen:
            seen.add(question)
            left = equation.format(**fields)
            answer = str(round(eval(left)))  # of our own digits
            yield question, sentence.format(**fields), f"{left} = {answer}", answer


def real_problems(source: Path, *names: str) -> list[dict]:
    """Rows of the files whose equation gives the answer; the same question counts once."""
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


def main(source: Path, output: Path = Path("runs/real/data")) -> None:
    """Write the sets. Raises InputError if a file is missing."""
    if not (source / "svamp.json").exists():
        raise InputError(f"{source}: there is no svamp.json; see python -m real.problems --help")
    real = real_problems(source, "addsub", "singleeq", "svamp")
    easy = easy_problems(0)
    expert = [
        row(f"easy-{n}", q, equation, answer, "easy")
        for n, (q, _, equation, answer) in enumerate(itertools.islice(easy, 960 + 128))
    ]
    sets = {"words_held": real[:256], "words_train": real[256 : 256 + 960]}
    sets |= {"easy_train": expert[:960], "easy_held": expert[960:]}
    sets["train"] = sets["words_train"] + sets["easy_train"]
    for seed in (0, 1):  # for W0 and W1
        sets[f"easy_base_{seed}"] = [
            row(f"base-{n}", q, sentence, answer, "easy")
            for n, (q, sentence, _, answer) in enumerate(itertools.islice(easy, 4000))
        ]
    sets["multiarith"] = real_problems(source, "multiarith")[:128]
    lines = (source / "instructions.jsonl").read_text().splitlines()
    items = sorted(map(json.loads, lines), key=lambda item: derive_seed("plan4", item["id"]))
    for item in items:
        item["text"] = f"{item['instruction']}\n{item['instances'][0]['input']}".strip()
    asked = [row(item["id"], item["text"], "-", "none", "own") for item in items]
    sets |= {"instructions_train": asked[:124], "instructions_held": asked[124:]}
    for name, rows in sets.items():
        write_rows(rows, output / f"{name}.jsonl")
        print(f"{len(rows):,} rows -> {output / name}.jsonl")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, prog="python -m real.problems", description=__doc__)
