"""What the model reads: files, examples, batches of token ids.

A training file is JSONL, one object a line, with `id, question, solution, answer, source`. The
options of a multiple-choice question are part of `question`, and `answer` is then the letter. Other
columns are kept for a reward function of one's own. Instead of its path a Hugging Face hub id
(`owner/name`, or `owner/name:config`) works too.
"""

import functools
import hashlib
import json
import math
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

FIELDS = ("id", "question", "solution", "answer", "source")  # of a row of a training file
PASS_TOKENS = 512  # padding tokens that cost as much as one extra forward and backward pass


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line that says what and where."""


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def one_line(error: Exception) -> str:
    """All that an error says, in one line, without what pydantic puts around it."""
    text = " ".join(str(error).split()).partition(" [type=")[0]
    return re.sub(r"^\d+ validation error for \w+ (?:\w+ \w+, )?", "", text) or repr(error)


# ------------------------------------------------------------------------------------------------
# Files


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it is renamed to `path` at the end, so no reader sees half.

    Raises InputError if it cannot be written, as on a full disk; `path` is then what it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)  # a full disk needs the space
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_rows(rows: Sequence[dict], path: str | Path) -> None:
    """Write JSONL, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        out.flush()
        os.fsync(out.fileno())


def write_json(value: dict, path: Path) -> None:
    """Write JSON, whole or not at all."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def read_rows(path_or_hub_id: str, split: str = "train") -> Iterator[tuple[str, dict]]:
    """Yield (where, row) for every row of a JSONL file or of a split of a hub data set.

    `where` is "file:line", for messages. Raises InputError for a missing file, a line that is not
    a JSON object, or a hub id that cannot be loaded.
    """
    path = Path(path_or_hub_id)
    if path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", parse_row(line, f"{path}:{number}")
    elif re.fullmatch(r"[\w-]+/[\w.-]+(:[\w.-]+)?", path_or_hub_id) and path.suffix not in (
        ".json",
        ".jsonl",
    ):
        import datasets  # takes seconds to import, and only hub ids need it

        name, _, config = path_or_hub_id.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # the hub client raises dozens of types
            raise InputError(
                f"{name}: no such file, and not on the hub either: {first_line(error)}"
            ) from error
        for number, row in enumerate(rows, start=1):
            yield f"{path_or_hub_id}:{number}", row
    else:
        raise InputError(f"{path_or_hub_id}: no such file")


def parse_row(line: bytes, where: str) -> dict:
    """Read one line of JSONL. Raises InputError if it is no JSON object of proper text."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if re.search(rb"\\u[dD]", line):  # only such an escape can be half a surrogate pair
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: has half a surrogate pair, which is no text") from error
    return row


def get_fields(where: str, row: dict, *names: str) -> list:
    """The values of a row's fields. Raises InputError if one is missing."""
    for name in names:
        if name not in row:
            raise InputError(f"{where}: field '{name}' is missing")
    return [row[name] for name in names]


def get_texts(where: str, row: dict, *names: str) -> list[str]:
    """A row's fields as text without white space around it; a number is written out, 27.0 as 27.

    Raises InputError if one is missing, or neither text nor a number.
    """
    texts = []
    for name, value in zip(names, get_fields(where, row, *names), strict=True):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = isinstance(value, str) and value.strip()
        finite = type(value) is int or (type(value) is float and math.isfinite(value))
        if not (text or finite):  # NaN is how pandas writes that there is nothing
            raise InputError(f"{where}: field '{name}' must be a non-empty text or a number")
        texts.append(str(value).strip())
    return texts


def load_config(path_or_hub_id: str, max_length: int, asked: str) -> PreTrainedConfig:
    """Load a model's config. Raises InputError if it is absent, or the model reads shorter text.

    `asked` says in the message which argument asks for `max_length` tokens.
    """
    try:
        config = AutoConfig.from_pretrained(path_or_hub_id)
    except Exception as error:  # transformers raises many types
        raise InputError(f"{path_or_hub_id}: no model there: {first_line(error)}") from error
    if config.get_text_config() is not config:
        raise InputError(f"{path_or_hub_id}: reads more than text ({config.model_type})")
    limit = getattr(config, "max_position_embeddings", None)  # some models have none
    if limit and max_length > limit:
        raise InputError(f"{asked} is beyond the model's limit of {limit} tokens")
    return config


# ------------------------------------------------------------------------------------------------
# Examples


@dataclass(frozen=True)
class Example:
    id: str
    question: str
    solution: str  # the expert trajectory o*: reasoning and boxed answer
    answer: str  # the reference that completions are checked against
    source: str
    extra: dict = field(default_factory=dict, hash=False)  # the other columns of its row
    where: str = field(default="", compare=False)  # "file:line" of its row, for messages

    @property
    def columns(self) -> dict:
        """The row of the training file: the five fields, then the other columns."""
        return {**{name: getattr(self, name) for name in FIELDS}, **self.extra}


def load_examples(path_or_hub_id: str) -> list[Example]:
    """Read a training file. Raises InputError that says which row is bad, and why."""
    examples, seen = [], {}
    for where, row in read_rows(path_or_hub_id):
        extra = {name: value for name, value in row.items() if name not in FIELDS}
        example = Example(*get_texts(where, row, *FIELDS), extra, where)
        if example.id in seen:
            raise InputError(f"{where}: id '{example.id}' was used before, at {seen[example.id]}")
        seen[example.id] = where
        examples.append(example)
    if not examples:
        raise InputError(f"{path_or_hub_id}: the data set is empty")
    return examples


# ------------------------------------------------------------------------------------------------
# Token ids and batches


@dataclass(frozen=True)
class Trajectory:
    """A prompt and what follows it, as token ids: an expert's solution, or a model's answer."""

    id: str  # of the query
    prompt_ids: list[int]
    completion_ids: list[int]  # a solution ends with the end of turn, which is learnt too

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TokenizedExample(Trajectory):
    """A query with its expert trajectory."""

    example: Example


class TokenizedExamples(Sequence[TokenizedExample]):
    """Many of them, at 4 bytes a token: Python's own lists of numbers take 36.

    `hash` is one of all that was appended: token ids and columns.
    """

    def __init__(self):
        self.examples, self.hash = [], hashlib.sha256()
        self.ids, self.ends = array("i"), array("q", [0])  # of each row, two ends

    def append(self, row: TokenizedExample) -> None:
        for ids in (row.prompt_ids, row.completion_ids):
            self.ids.extend(ids)
            self.ends.append(len(self.ids))
        self.examples.append(row.example)
        self.hash.update(array("q", [*row.prompt_ids, -1, *row.completion_ids]))
        self.hash.update(json.dumps(row.example.columns, default=str).encode())

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int | slice) -> TokenizedExample | list[TokenizedExample]:
        i = range(len(self))[i]
        if isinstance(i, range):
            return [self[n] for n in i]
        start, middle, end = self.ends[2 * i : 2 * i + 3]
        prompt_ids, completion_ids = self.ids[start:middle], self.ids[middle:end]
        example = self.examples[i]
        return TokenizedExample(example.id, list(prompt_ids), list(completion_ids), example)


def batch_indices(num_examples: int, batch_size: int, batch: int, seed: int) -> list[int]:
    """Which examples make up batch number `batch`, counted from 0.

    The stream of examples is one seeded permutation per epoch, end to end, cut into batches. It is
    a function of its arguments alone, so a resumed run or another number of ranks sees the same.
    """
    positions = range(batch * batch_size, (batch + 1) * batch_size)
    places = (divmod(position, num_examples) for position in positions)
    return [int(epoch_order(num_examples, epoch, seed)[place]) for epoch, place in places]


@functools.lru_cache(maxsize=2)  # a batch may begin in one epoch and end in the next
def epoch_order(num_examples: int, epoch: int, seed: int) -> np.ndarray:
    """The order of the examples in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


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
    the next begins is chosen so that padding and passes together cost least. Every rank gets the
    same number of passes; in the last, a rank's share may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = [order[i : i + world_size] for i in range(0, len(order), world_size)]
    longest = np.array([lengths[group[0]] for group in groups], dtype=float)
    # cheapest[n]: cost of the first n groups; starts[n - 1]: where the last of their passes starts
    cheapest, starts = np.zeros(len(groups) + 1), []
    for end in range(1, len(groups) + 1):
        tokens = longest[:end] * np.arange(end, 0, -1)  # of a pass that starts at 0, 1, ...
        tokens[:-1][tokens[:-1] > max_tokens] = np.inf
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

    rows: torch.Tensor  # (B,) int64, the rows' places in the list that they were taken from
    input_ids: torch.Tensor  # (B, T) int64, the tokens that are read
    targets: torch.Tensor  # (B, T) int64, the token that follows each of them
    mask: torch.Tensor  # (B, T) bool, true where the target belongs to the completion
    positions: torch.Tensor  # int64, where the mask is true in the flattened (B * T,)

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy that the host does not wait for: to a GPU it goes from pinned memory."""
        tensors = vars(self).values()
        if device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def collate(
    trajectories: Sequence[Trajectory], rows: Sequence[int], learn: bool = True
) -> MicroBatch:
    """Pack the named rows. The mask goes by position, never by pad id.

    Args:
        rows: indices into `trajectories`.
        learn: false gives an all-false mask, so the rows have no loss.
    """
    length = max(len(trajectories[i]) for i in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for n, i in enumerate(rows):
        trajectory = trajectories[i]
        tokens[n, : len(trajectory)] = torch.tensor(
            trajectory.prompt_ids + trajectory.completion_ids
        )
        mask[n, len(trajectory.prompt_ids) : len(trajectory)] = learn
    mask = mask[:, 1:]
    positions = mask.flatten().nonzero()[:, 0]
    return MicroBatch(torch.tensor(rows), tokens[:, :-1], tokens[:, 1:], mask, positions)


def pad_completions(
    values: Sequence[Sequence[float]], trajectories: Sequence[Trajectory]
) -> torch.Tensor:
    """One value per completion token, laid out as `collate` lays out the targets: (N, T)."""
    padded = torch.zeros(len(trajectories), max(map(len, trajectories)) - 1)
    for row, numbers, trajectory in zip(padded, values, trajectories, strict=True):
        start = len(trajectory.prompt_ids) - 1
        row[start : start + len(numbers)] = torch.tensor(numbers)
    return padded
