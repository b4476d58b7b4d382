r"""A training file becomes examples, and examples become batches.

A training file is JSONL. Two rows of the demo's world, where sums go from left to right, modulo 10:

    {"id": "1", "question": "7+5*3", "solution": "\\boxed{6}", "answer": "6", "source": "demo"}
    {"id": "2", "question": "1+2", "solution": "\\boxed{3}", "answer": "3", "source": "demo"}

Options of a multiple-choice question are part of `question`, and `answer` is then the letter. Other
columns are kept for a reward function of yours. A hub id (`owner/name`, `owner/name:config`) works
in place of a path.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import cpu  # noqa: F401  before torch
from verify import as_text

import numpy as np
import torch
from torch import Tensor

FIELDS = ("id", "question", "solution", "answer", "source")  # in each row of a training file


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line that says what and where."""


@contextmanager
def blame(what: str, kinds: tuple = (Exception,)) -> Iterator[None]:
    """Turn these kinds of errors into an InputError: one line that begins with `what`."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {' '.join(str(error).split())[:500]}") from error


def check_numbers(args: object, *may_be_0: str) -> None:
    """Raise InputError unless all fields that are numbers are above 0; those named may be 0."""
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (value > 0 or (value == 0 and name in may_be_0)):
            wanted = "0 or more" if name in may_be_0 else "above 0"
            raise InputError(f"--{name} must be {wanted}, got {value}")


# ---- Files ---------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` at the end: no reader sees half a file."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)  # Ctrl-C or a full disk leaves it.


def write_rows(rows: Iterable[dict], path: str | Path) -> None:
    """Write JSONL, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_json(value: dict, path: Path) -> None:
    """Write JSON, whole or not at all."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def read_rows(path_or_hub_id: str, split: str = "train") -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", row) for every row of a JSONL file or of a split of a hub data set."""
    path = Path(path_or_hub_id)
    if path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    with blame(f"{path}:{number}: not a JSON object"):
                        row = {**json.loads(line)}
                    yield f"{path}:{number}", row
    elif path_or_hub_id.count("/") == 1 and not (path.is_dir() or ".json" in path.suffix):
        import datasets  # It takes seconds to import.

        name, _, config = path_or_hub_id.partition(":")
        with blame(f"{name}: no such file, and as a hub id"):
            rows = datasets.load_dataset(name, config or None, split=split)
        for number, row in enumerate(rows, start=1):
            yield f"{path_or_hub_id}:{number}", row
    else:
        raise InputError(f"{path}: no such file")


def get_texts(where: str, row: dict, *names: str) -> list[str]:
    """A row's fields as text. Raises InputError for one that is neither text nor a number."""
    texts = []
    for name in names:
        with blame(f"{where}: field '{name}'", (TypeError, UnicodeError)):  # none, half an emoji
            texts.append(as_text(row.get(name)).strip())
            texts[-1].encode()
        if not texts[-1]:
            raise InputError(f"{where}: field '{name}' is empty")
    return texts


# ---- Examples ------------------------------------------------------------------------------------


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


def load_examples(path_or_hub_id: str, **fixed: str) -> list[Example]:
    """Read a training file. Raises InputError that says which row is bad, and why.

    `fixed` sets fields of all rows; a row's own value stays in `columns`. Ids are optional.
    """
    examples, seen = [], {}
    names = [name for name in FIELDS if name not in fixed]
    for where, row in read_rows(path_or_hub_id):
        row = {"id": f"row-{len(examples)}", **row}
        texts = dict(zip(names, get_texts(where, row, *names), strict=True))
        extra = {name: value for name, value in row.items() if name not in names}
        example = Example(**texts, **fixed, extra=extra, where=where)
        if example.id in seen:
            raise InputError(f"{where}: id '{example.id}' was used before, at {seen[example.id]}")
        seen[example.id] = where
        examples.append(example)
    if not examples:
        raise InputError(f"{path_or_hub_id}: the data set is empty")
    return examples


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and what follows it, as token ids: an expert's solution, or a model's answer."""

    id: str  # the query's
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]  # a solution ends with the end of turn, which is learnt too

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, eq=False)
class Query(Trajectory):
    """A question as token ids, with its expert trajectory; int32 arrays, 4 bytes a token."""

    example: Example


Rows = Sequence[Trajectory]  # (N,)
Queries = Sequence[Query]  # (B,)


def hash_examples(examples: Queries) -> str:
    """A hash of all that a run reads of its data: token ids, and columns (null if not JSON)."""
    digest = hashlib.sha256()
    for e in examples:
        columns = json.dumps([len(e.prompt_ids), e.example.columns], default=lambda _: None)
        digest.update(columns.encode())
        digest.update(e.prompt_ids.tobytes() + e.response_ids.tobytes())
    return digest.hexdigest()


# ---- Batches -------------------------------------------------------------------------------------


def batch_indices(num_examples: int, batch_size: int, batch: int, seed: int) -> list[int]:
    """Which examples make up batch number `batch`, counted from 0: the same on any number of ranks.

    One seeded permutation per epoch, end to end, is cut into batches.
    """
    positions = range(batch * batch_size, (batch + 1) * batch_size)
    epochs = {position // num_examples for position in positions}
    orders = {e: np.random.default_rng([seed, e]).permutation(num_examples) for e in epochs}
    return [int(orders[p // num_examples][p % num_examples]) for p in positions]


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from any parts, the same on every machine (Python's own hash is not)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def split_rows(lengths: Sequence[int], world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Spread rows over ranks and micro-batches: `result[n][rank]` lists indices into `lengths`.

    Rows are sorted by length and dealt out to the ranks, longest first, so ranks do equal work. A
    micro-batch ends when the next row would bring it above `max_tokens` tokens a rank, padding
    included. A rank's last share may be empty.

    >>> split_rows([9, 4, 8, 3], world_size=2, max_tokens=10)
    [[[0], [2]], [[1], [3]]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    while order:
        size = world_size * max(1, max_tokens // lengths[order[0]])  # rows of all ranks
        batch, order = order[:size], order[size:]
        batches.append([batch[rank::world_size] for rank in range(world_size)])
    return batches


def count_rows(rows: Rows, keep: Tensor) -> dict[str, int]:
    """For a step's metrics: how many rows are not kept, and the tokens of the others."""
    tokens = sum(len(row) for row, kept in zip(rows, keep.tolist(), strict=True) if kept)
    return {"skipped_sequences": int((~keep).sum()), "train_tokens": tokens}


@dataclass
class MicroBatch:
    """Right-padded rows for one forward and backward; T is the longest row less one.

    Causal attention never looks right, so padding on the right needs no attention mask.
    """

    indices: Tensor  # (B,) int64, of the rows in the list that they were taken from
    input_ids: Tensor  # (B, T) int64, the tokens that are read
    targets: Tensor  # (B, T) int64, the token that follows each of them
    mask: Tensor  # (B, T) bool, true where the target belongs to the completion
    is_last: bool = True  # whether the optimizer steps after its backward

    def to(self, device: torch.device) -> "MicroBatch":
        tensors = (self.indices, self.input_ids, self.targets, self.mask)
        return MicroBatch(*(tensor.to(device) for tensor in tensors), self.is_last)


def collate(rows: Rows, indices: Sequence[int]) -> MicroBatch:
    """Pack the rows with these indices. The mask goes by position, never by pad id.

    The ids of 7+5*3 and 1+2, without the template around them; 2 is the end of turn:

    >>> rows = Trajectory("1", [15, 18, 13, 20, 11], [14, 2]), Trajectory("2", [9, 18, 10], [11, 2])
    >>> batch = collate(rows, [0, 1])
    >>> batch.input_ids.tolist()
    [[15, 18, 13, 20, 11, 14], [9, 18, 10, 11, 2, 0]]
    >>> batch.targets.tolist()
    [[18, 13, 20, 11, 14, 2], [18, 10, 11, 2, 0, 0]]
    >>> batch.mask.int().tolist()
    [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]
    """
    length = max(len(rows[i]) for i in indices)
    tokens = torch.zeros(len(indices), length, dtype=torch.long)
    mask = torch.zeros(len(indices), length, dtype=torch.bool)
    for n, row in enumerate(rows[i] for i in indices):
        ids = np.concatenate([row.prompt_ids, row.response_ids])
        tokens[n, : len(ids)] = torch.from_numpy(ids)
        mask[n, len(row.prompt_ids) : len(ids)] = True
    return MicroBatch(torch.tensor(indices), tokens[:, :-1], tokens[:, 1:], mask[:, 1:])
