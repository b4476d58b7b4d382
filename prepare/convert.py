"""Convert public data sets into training files.

    python -m prepare.convert aqua  deepmind/aqua_rat:raw data/aqua.jsonl     # AQuA-RAT
    python -m prepare.convert gsm8k openai/gsm8k:main     data/gsm8k.jsonl    # GSM8K
    python -m prepare.convert svamp ChilleD/SVAMP         data/svamp.jsonl    # SVAMP

The source is a hub id, or a file with the same columns: JSONL, or a list in JSON.
"""

import json
import re
from pathlib import Path
from typing import Literal

from data import Example, InputError, get_texts, read_rows, write_rows
from launch import command_line
from verify import is_correct

import tyro
from tyro.conf import Positional


def convert(
    name: Positional[Literal["aqua", "gsm8k", "svamp"]],
    source: Positional[str],
    output: Positional[str],
) -> None:
    """Write a training file. Raises InputError that names the row which cannot be read.

    Args:
        name: the data set.
        source: its hub id, or a file with the same columns.
        output: the training file to write.
    """
    read = {"aqua": read_aqua, "gsm8k": read_gsm8k, "svamp": read_svamp}[name]
    rows = read_rows(source)
    text = Path(source).read_text(encoding="utf-8-sig") if Path(source).is_file() else ""
    if text.lstrip().startswith("["):
        rows = ((f"{source}:{n}", row) for n, row in enumerate(json.loads(text), start=1))
    fields = [read(where, row) for where, row in rows]
    examples = [Example(f"{name}-{n}", *texts, name) for n, texts in enumerate(fields) if texts]
    if not examples:
        raise InputError(f"{source}: the data set is empty")
    write_rows([example.columns for example in examples], output)
    left_out = f" ({fields.count(None)} left out: wrong equations)" if None in fields else ""
    print(f"{len(examples):,} examples{left_out} -> {output}")


def read_aqua(where: str, row: dict) -> tuple[str, str, str]:
    """Question, solution, answer of a row with `question, options, rationale, correct`."""
    question, letter = get_texts(where, row, "question", "correct")
    rationale, options = row.get("rationale") or "", row.get("options")
    if not isinstance(options, list) or {type(text) for text in [rationale, *options]} != {str}:
        raise InputError(f"{where}: 'options' must be a list of texts, and 'rationale' a text")
    options = [option.strip() for option in options]
    if letter not in {option[:1] for option in options}:
        raise InputError(f"{where}: the correct letter '{letter}' is not among the options")
    solution = f"{rationale.strip()}\n\nThe answer is \\boxed{{{letter}}}."
    return "\n".join([question, *options]), solution, letter


def read_gsm8k(where: str, row: dict) -> tuple[str, str, str]:
    """Question, solution, answer of a row with `question, answer`, whose last line is `#### 42`."""
    question, solution = get_texts(where, row, "question", "answer")
    reasoning, marker, answer = solution.rpartition("####")
    if not marker or not answer.strip():
        raise InputError(f"{where}: the answer has no last line '#### result'")
    answer = answer.strip()
    if "," in answer and not re.fullmatch(r"\D?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        raise InputError(f"{where}: the commas of the result '{answer}' separate no thousands")
    answer = answer.replace(",", "")
    reasoning = re.sub(r"<<[^>]*>>", "", reasoning).strip()  # notes for a calculator
    return question, f"{reasoning}\n\nThe answer is \\boxed{{{answer}}}.", answer


def read_svamp(where: str, row: dict) -> tuple[str, str, str] | None:
    """Question, solution, answer of a row with `Body, Question, Equation, Answer`.

    None if the equation does not give the answer: one of the 1,000 does not.
    """
    body, question, equation, answer = get_texts(
        where, row, "Body", "Question", "Equation", "Answer"
    )
    answer, equation = (re.sub(r"(\d)\.0\b", r"\1", text) for text in (answer, equation))
    equation = re.sub(r"^\( (.*) \)$", r"\1", equation)  # its outer brackets
    if not is_correct(rf"\boxed{{{equation}}}", answer):
        return None
    return (
        f"{body} {question}",
        f"{equation} = {answer}\n\nThe answer is \\boxed{{{answer}}}.",
        answer,
    )


if __name__ == "__main__":
    with command_line():
        tyro.cli(convert, prog="python -m prepare.convert", description=__doc__)
