"""Look at a training file.

    python -m look.training_set show data/train.jsonl --index 3  # one row, as the model sees it
    python -m look.training_set stats data/train.jsonl           # lengths, answers, sources
    python -m look.training_set suspect data/weighted.suspects.jsonl  # of prepare.weigh's list

The tokens are those of --tokenizer; the default is the one that the report next to a file names.
"""

import json
from pathlib import Path

from data import InputError, collate, load_examples, read_rows
from launch import check_solutions, command_line
from models import ASK_LETTER, instruction, load_tokenizer, tokenize_examples
from ranks import init_ranks
from verify import Verifier

import pandas as pd
import tyro
from transformers import PreTrainedTokenizerBase

NO_LIMIT = 2**31  # tokens; no example is longer, so all are kept
CONTEXT = 4  # tokens that `show` lists on each side of where the loss starts, and at the end


def show(file: tyro.conf.Positional[str], index: int = 0, tokenizer: str | None = None) -> None:
    """Print one row as the model sees it: the prompt, what has a loss, the lengths.

    Args:
        file: path or hub id.
        index: of the row, counted from 0.
        tokenizer: hub id or folder; default: the one that the file was curated with.
    """
    examples = load_examples(file)
    if not 0 <= index < len(examples):
        raise InputError(f"--index {index}: {file} has rows 0 to {len(examples) - 1}")
    example, tokens = examples[index], find_tokenizer(file, tokenizer)
    tokenized, _ = tokenize_examples([example], tokens, NO_LIMIT, 0)
    batch = collate(tokenized, [0])
    ids = [*batch.input_ids[0, :1].tolist(), *batch.targets[0].tolist()]
    learnt = [False, *batch.mask[0].tolist()]  # the first token is the target of none
    first, end = learnt.index(True), len(ids)

    print(f"row {index} of {len(examples):,}: id {example.id}, answer {example.answer}, ", end="")
    print(f"source {example.source}")
    print(f"\n==== read, without loss: {first:,} tokens")
    print(tokens.decode(ids[:first]))
    print(f"\n==== learnt, with loss: {end - first:,} tokens, the end of turn included")
    print(tokens.decode(ids[first:]))
    print(f"\n==== {end:,} tokens in all; the border, and the end")
    border = range(max(0, first - CONTEXT), min(first + CONTEXT, end))
    tail = range(max(border.stop, end - CONTEXT), end)
    for position in [*border, *tail]:
        if position == tail.start > border.stop:
            print("      ...")
        loss = "loss" if learnt[position] else "    "
        print(f"{position:>9} {loss} {ids[position]:>7} {tokens.decode([ids[position]])!r}")


def stats(file: tyro.conf.Positional[str], tokenizer: str | None = None) -> None:
    """Summarise a training file: lengths, answers, sources, solutions that miss their references.

    Args:
        file: path or hub id.
        tokenizer: hub id or folder; default: the one that the file was curated with.
    """
    examples = load_examples(file)
    rows, _ = tokenize_examples(examples, find_tokenizer(file, tokenizer), NO_LIMIT, 0)
    print(f"{file}: {len(examples):,} examples")
    prompts = [len(row.prompt_ids) for row in rows]
    solutions = [len(row.response_ids) for row in rows]
    lengths = pd.DataFrame({"prompt": prompts, "solution": solutions})
    print(f"\ntokens\n{lengths.describe(percentiles=[0.05, 0.5, 0.95]).round(1).to_string()}")
    letters = [
        example.answer if instruction(example.answer) is ASK_LETTER else "not a letter"
        for example in examples
    ]
    for name, column in ("answer", letters), ("source", [example.source for example in examples]):
        print(f"\n{pd.Series(column, name=name).value_counts().to_string()}", flush=True)
    init_ranks("gloo")
    with Verifier(2) as verifier:
        check_solutions(verifier, rows)


def suspect(file: tyro.conf.Positional[str], index: int = 0) -> None:
    """Print a suspect row of prepare.weigh: the expert's solution, and what the model says.

    Args:
        file: the list, ...suspects.jsonl.
        index: of the row, counted from 0; the most agreed come first.
    """
    rows = [row for _, row in read_rows(file)]
    if not 0 <= index < len(rows):
        raise InputError(f"--index {index}: {file} has {len(rows)} rows, counted from 0")
    row = rows[index]
    if "agreed" not in row:
        raise InputError(f"{file}: is no list of suspects; prepare.weigh writes ...suspects.jsonl")
    print(f"row {index} of {len(rows):,}: id {row['id']}\n\n{row['question']}")
    print(f"\n==== the reference: {row['answer']}\n{row['solution']}")
    print(f"\n==== {row['agreeing']} of {row['answers']} answers: {row['agreed']}")
    print(row["completion"])


def find_tokenizer(file: str, tokenizer: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is given, or that the report next to a training file names."""
    report = Path(file).with_suffix(".report.json")
    if not tokenizer and not report.exists():
        raise InputError(f"{file}: no report next to it names a tokenizer: give --tokenizer")
    return load_tokenizer(tokenizer or json.loads(report.read_text())["arguments"]["tokenizer"])


if __name__ == "__main__":
    with command_line():
        tyro.extras.subcommand_cli_from_dict(
            {"show": show, "stats": stats, "suspect": suspect},
            prog="python -m look.training_set",
            description=__doc__,
        )
