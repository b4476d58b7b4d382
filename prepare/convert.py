"""Convert public data sets into training files.

    python -m prepare.convert aqua  deepmind/aqua_rat:raw data/aqua.jsonl     # AQuA-RAT
    python -m prepare.convert gsm8k openai/gsm8k:main     data/gsm8k.jsonl    # GSM8K

The source is a hub id or a JSONL file with the same columns.
"""

import re

import tyro

from data import Example, InputError, get_texts, read_rows, write_rows
from prepare import run_commands


def import_aqua(source: tyro.conf.Positional[str], output: tyro.conf.Positional[str]) -> None:
    """Convert AQuA-RAT (question, options, rationale, correct) to the training format.

    Args:
        source: JSONL file, or the hub id deepmind/aqua_rat:raw.
        output: the training file to write.
    """
    examples = []
    for number, (where, row) in enumerate(read_rows(source)):
        question, letter = get_texts(where, row, "question", "correct")
        rationale, options = row.get("rationale") or "", row.get("options")
        if not isinstance(options, list) or {type(text) for text in [rationale, *options]} != {str}:
            raise InputError(f"{where}: 'options' must be a list of texts, and 'rationale' a text")
        options = [option.strip() for option in options]
        if letter not in {option[:1] for option in options}:
            raise InputError(f"{where}: the correct letter '{letter}' is not among the options")
        solution = f"{rationale.strip()}\n\nThe answer is \\boxed{{{letter}}}."
        question = "\n".join([question, *options])
        examples.append(Example(f"aqua-{number}", question, solution, letter, "aqua"))
    write_examples(examples, source, output)


def import_gsm8k(source: tyro.conf.Positional[str], output: tyro.conf.Positional[str]) -> None:
    """Convert GSM8K (question, answer with a last line `#### 42`) to the training format.

    Args:
        source: JSONL file, or the hub id openai/gsm8k:main.
        output: the training file to write.
    """
    examples = []
    for number, (where, row) in enumerate(read_rows(source)):
        question, solution = get_texts(where, row, "question", "answer")
        reasoning, marker, answer = solution.rpartition("####")
        if not marker or not answer.strip():
            raise InputError(f"{where}: the answer has no last line '#### result'")
        answer = answer.strip()
        if "," in answer and not re.fullmatch(r"\D?\d{1,3}(,\d{3})+(\.\d+)?", answer):
            raise InputError(f"{where}: the commas of the result '{answer}' separate no thousands")
        answer = answer.replace(",", "")
        reasoning = re.sub(r"<<[^>]*>>", "", reasoning).strip()  # notes for a calculator
        solution = f"{reasoning}\n\nThe answer is \\boxed{{{answer}}}."
        examples.append(Example(f"gsm8k-{number}", question, solution, answer, "gsm8k"))
    write_examples(examples, source, output)


def write_examples(examples: list[Example], source: str, output: str) -> None:
    """Write a training file. Raises InputError if the source had no rows."""
    if not examples:
        raise InputError(f"{source}: the data set is empty")
    write_rows([example.columns for example in examples], output)
    print(f"{len(examples):,} examples -> {output}")


if __name__ == "__main__":
    run_commands("python -m prepare.convert", __doc__, {"aqua": import_aqua, "gsm8k": import_gsm8k})
