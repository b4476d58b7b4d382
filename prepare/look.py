"""Look at a training file.

    python -m prepare.look show  data/train.jsonl --index 3    # one row, as the model sees it
    python -m prepare.look stats data/train.jsonl              # lengths, answers, sources

The tokens are those of --tokenizer; the default is the one that a curated file's report names.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from data import (
    ASK_LETTER,
    InputError,
    collate,
    instruction,
    load_examples,
    load_tokenizer,
    tokenize_examples,
)
from prepare import run_commands

NO_LIMIT = 2**31  # tokens; no example is longer, so all are kept
CONTEXT = 4  # tokens that `show` lists on each side of where the loss starts, and at the end
BARS = 16  # of a histogram of lengths, at most
MIN_WIDTH = 16  # tokens or characters that one bar stands for, at least


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
    tokenizer = tokenizer or curated_with(file)
    if not tokenizer:
        raise InputError(f"{file}: no report next to it names a tokenizer: give --tokenizer")
    example, tokens = examples[index], load_tokenizer(tokenizer)
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
    """Summarise a training file: lengths, answers, sources.

    Args:
        file: path or hub id.
        tokenizer: hub id or folder; default: the one that the file was curated with. Without
            one, lengths are in characters.
    """
    examples = load_examples(file)
    tokenizer = tokenizer or curated_with(file)
    if tokenizer:
        rows, _ = tokenize_examples(examples, load_tokenizer(tokenizer), NO_LIMIT, 0)
        lengths = {
            "prompt": [len(row.prompt_ids) for row in rows],
            "solution": [len(row.completion_ids) for row in rows],
        }
    else:
        lengths = {
            "question": [len(example.question) for example in examples],
            "solution": [len(example.solution) for example in examples],
        }
    unit = "tokens" if tokenizer else "characters"
    print(f"{file}: {len(examples):,} examples")
    for name, values in lengths.items():
        numbers = length_summary(values)
        histogram = numbers.pop("histogram")
        print(f"\n{name}, {unit}: " + ", ".join(f"{key} {n:,}" for key, n in numbers.items()))
        print_bars(histogram)
    answers = Counter(
        example.answer if instruction(example.answer) is ASK_LETTER else "not a letter"
        for example in examples
    )
    print("\nanswers")
    print_bars(dict(sorted(answers.items())))
    print("\nsources")
    print_bars(dict(Counter(example.source for example in examples).most_common()))


def curated_with(file: str) -> str | None:
    """The tokenizer that the report next to a training file names, if there is one."""
    try:
        report = Path(file).with_suffix(".report.json").read_text()
        return json.loads(report)["arguments"]["tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def length_summary(lengths: Sequence[int]) -> dict:
    """Minimum, mean, percentiles, maximum, and a histogram {start of the bar: count}."""
    values = np.array(lengths)
    width = max(MIN_WIDTH, 2 ** int(np.ceil(np.log2((values.max() + 1) / BARS))))
    counts = np.bincount(values // width)
    percentiles = np.percentile(values, (5, 50, 95)).round().astype(int).tolist()
    return {
        "min": int(values.min()),
        "mean": round(float(values.mean()), 1),
        **dict(zip(("p5", "median", "p95"), percentiles, strict=True)),
        "max": int(values.max()),
        "histogram": {str(width * bar): int(count) for bar, count in enumerate(counts)},
    }


def print_bars(counts: dict[str, int]) -> None:
    """Print counts and shares, with bars of up to 40 characters."""
    width, total, most = max(map(len, counts)), sum(counts.values()), max(counts.values())
    for name, count in counts.items():
        bar = "█" * round(40 * count / most)
        print(f"    {name:>{width}}{count:>9,}{100 * count / total:>7.1f} %  {bar}".rstrip())


if __name__ == "__main__":
    run_commands("python -m prepare.look", __doc__, {"show": show, "stats": stats})
