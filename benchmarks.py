"""The paper's seven benchmarks: where their problems are, and how the paper scores them.

Problems come from the hub, or from local copies `<folder>/<name>.jsonl` with the hub's columns.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data import InputError, get_texts, read_rows
from prompts import ASK_FREE, ASK_LETTER, Prompt, instruction


@dataclass(frozen=True)
class Problem:
    id: str
    question: str  # with its options, if it has any
    answer: str  # the reference
    instruction: str  # what the prompt asks for

    def fingerprint(self, prompt: Prompt) -> str:
        """A hash of all that decides what is answered and whether it is right."""
        turns = [turn["content"] for turn in prompt.messages(self.question, self.instruction)]
        text = "\n".join([*turns, self.answer])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Benchmark:
    title: str
    hub_id: str
    split: str
    num_problems: int  # any other number is refused
    num_samples: int  # answers to each problem
    question: str = "problem"  # name of a column, like the next two
    answer: str = "answer"
    wrong_options: tuple[str, ...] = ()
    instruction: str = ASK_FREE
    year: str = ""  # only the problems of this one
    gated: bool = False


AMC = "scottgeng00/amc_22-24"
BENCHMARKS = {
    "aime24": Benchmark("AIME 24", "HuggingFaceH4/aime_2024", "train", 30, 16),
    "aime25": Benchmark("AIME 25", "math-ai/aime25", "test", 30, 16),
    "amc22": Benchmark("AMC 22", AMC, "test", 43, 16, year="2022"),
    "amc23": Benchmark("AMC 23", AMC, "test", 46, 16, year="2023"),
    "amc24": Benchmark("AMC 24", AMC, "test", 45, 16, year="2024"),
    "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500", "test", 500, 1),
    "gpqa_diamond": Benchmark(
        *("GPQA-Diamond", "Idavidrein/gpqa:gpqa_diamond", "train", 198, 1),
        question="Question",
        answer="Correct Answer",
        wrong_options=tuple(f"Incorrect Answer {n}" for n in (1, 2, 3)),
        instruction=ASK_LETTER,
        gated=True,
    ),
}


def load_benchmark(
    name: str, data_dir: str | Path | None = None, option: str = "--data_dir"
) -> list[Problem]:
    """The problems of a benchmark, from the hub or from `<data_dir>/<name>.jsonl`.

    A local copy has the hub's columns; what the hub calls `problem` may be called `question`.
    Raises InputError if it cannot be read, or does not have the number of problems that it should
    have; `option` is the argument of the command line that gives `data_dir`.
    """
    benchmark = BENCHMARKS[name]
    source = str(Path(data_dir) / f"{name}.jsonl") if data_dir else benchmark.hub_id
    try:
        rows = list(read_rows(source, benchmark.split))
    except InputError as error:
        if data_dir:
            raise
        page = f"https://huggingface.co/datasets/{source.partition(':')[0]}"
        gated = f"; it is gated: accept its terms at {page}, then `hf auth login`"
        raise InputError(
            f"{name}: {error}{gated if benchmark.gated else ''}; "
            f"or give a folder that has {name}.jsonl with {option}"
        ) from error
    problems = read_benchmark(name, rows)
    if len(problems) != benchmark.num_problems:
        raise InputError(
            f"{source}: has {len(problems)} problems, but {name} has {benchmark.num_problems}; "
            "problems of your own are scored with --benchmark_file"
        )
    return problems


def read_benchmark(name: str, rows: Sequence[tuple[str, dict]]) -> list[Problem]:
    """Turn (where, row) of a benchmark's source into problems, however many there are."""
    benchmark, problems = BENCHMARKS[name], []
    for where, row in rows:
        if benchmark.year and str(row.get("year", benchmark.year)) != benchmark.year:
            continue
        column = benchmark.question if benchmark.question in row else "question"
        question, answer = get_texts(where, row, column, benchmark.answer)
        if benchmark.wrong_options:
            wrong = get_texts(where, row, *benchmark.wrong_options)
            question, answer = with_options(question, answer, wrong)
        id = f"{name}-{len(problems)}"
        problems.append(Problem(id, question, answer, benchmark.instruction))
    return problems


def load_problems(path: str | Path) -> list[Problem]:
    """Read a JSONL file of one's own: rows with `question`, `answer` and, if wanted, `id`."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file")
    problems, seen = [], set()
    for where, row in read_rows(str(path)):
        question, answer = get_texts(where, row, "question", "answer")
        id = f"row-{len(problems)}" if row.get("id") is None else str(row["id"])
        if id in seen:
            raise InputError(f"{where}: id '{id}' was used before")
        seen.add(id)
        problems.append(Problem(id, question, answer, instruction(answer)))
    if not problems:
        raise InputError(f"{path}: the data set is empty")
    return problems


def with_options(question: str, right: str, wrong: Sequence[str]) -> tuple[str, str]:
    """Append labelled options to a question; returns it and the letter of the right one.

    Their order is that of a hash: it looks random, and is the same on every machine and for ever.
    """
    options = sorted(
        [right, *wrong],
        key=lambda option: hashlib.sha256(f"{question}\n{option}".encode()).digest(),
    )
    labels = "ABCDEFGHIJ"[: len(options)]
    lines = [f"({label}) {option}" for label, option in zip(labels, options, strict=True)]
    return "\n".join([question, "", *lines]), labels[options.index(right)]
