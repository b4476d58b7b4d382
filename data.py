"""What the model reads: files, examples, prompts, token ids, batches.

A training file is JSONL with `id, question, solution, answer, source`. Options of a multiple-choice
question are part of `question`, and `answer` is then the letter. Other columns are kept for a
reward function of yours. A hub id (`owner/name`, `owner/name:config`) works in place of a path.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import cpu  # noqa: F401  before torch
from verify import as_text, reference_letter

import numpy as np
import torch

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"

# The prompt, inside the model's chat template. Edit it here; a run's args.json records it.
SYSTEM_PROMPT = ""  # a system turn before the question; "" for none
ASK_FREE = "Please reason step by step, and put your final answer within \\boxed{}."
ASK_LETTER = "Please reason step by step, and put the letter of your choice within \\boxed{}."
PROMPT = {"system": SYSTEM_PROMPT, "free answer": ASK_FREE, "multiple choice": ASK_LETTER}
TODAY = datetime.date(2026, 1, 1)  # templates that ask get the same date on every day

FIELDS = ("id", "question", "solution", "answer", "source")  # of a row of a training file
MARK = "Aa 0987654321"  # a turn's text, to find where a chat template puts it
TOKENIZER_BATCH = 200  # examples in one call of the tokenizer
MAX_PADDING = 512  # padding tokens: more cost more than another micro-batch does


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line that says what and where."""


@contextmanager
def blame(what: str, kinds: tuple = (Exception,)) -> Iterator[None]:
    """Turn these kinds of errors into an InputError: one line that begins with `what`."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {' '.join(str(error).split())[:500]}") from error


# ---- Files ---------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` at the end: no reader sees half a file."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.rename(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)  # it is there after Ctrl-C, or on a full disk


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
    if path.is_dir():
        raise InputError(f"{path}: is a folder")
    if path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    advice = "; docs/training-set.md converts it" if path.suffix == ".csv" else ""
                    raise InputError(f"{path}:{number}: not JSON ({error}){advice}") from error
                if not isinstance(row, dict):
                    raise InputError(f"{path}:{number}: expected a JSON object")
                yield f"{path}:{number}", row
    elif re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.json)(?<!\.jsonl)(:[\w.-]+)?", path_or_hub_id):
        import datasets  # takes seconds to import, and only hub ids need it

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
        if name not in row:
            raise InputError(f"{where}: there is no field '{name}'")
        try:
            text = as_text(row[name]).strip()
            text.encode()
        except (TypeError, UnicodeError):  # it is null, pandas' NaN or half an emoji
            text = ""
        texts.append(text)
        if not text:
            raise InputError(f"{where}: field '{name}' must be a non-empty text or a number")
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

    `fixed` fields are the same in all; a row's own stay in `columns`. Then no row needs an id.
    """
    examples, seen = [], {}
    names = [name for name in FIELDS if name not in fixed]
    for where, row in read_rows(path_or_hub_id):
        if fixed:
            row = {"id": f"row-{len(examples)}", **row}
        if "messages" in row and not {*names} <= row.keys():
            raise InputError(f"{where}: is a chat; docs/training-set.md converts it")
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


# ---- Prompts -------------------------------------------------------------------------------------


def instruction(answer: str) -> str:
    """What the prompt asks for. A letter as reference means multiple choice."""
    return ASK_LETTER if reference_letter(answer) else ASK_FREE


def messages(question: str, ask: str) -> list[dict[str, str]]:
    """The turns before the answer: the system prompt, then the question with its instruction."""
    system = [{"role": "system", "content": SYSTEM_PROMPT}] if SYSTEM_PROMPT else []
    return [*system, {"role": "user", "content": f"{question}\n{ask}" if ask else question}]


def prompt_text(tokenizer: Tokenizer, question: str, ask: str) -> str:
    """The prompt as the model reads it, up to where its answer begins."""
    return render(tokenizer, messages(question, ask), add_generation_prompt=True)


def render(tokenizer: Tokenizer, turns: list[dict], **options) -> str:
    """What the chat template makes of the turns. Raises InputError if it fails."""
    options |= {"tokenize": False, "strftime_now": TODAY.strftime}
    with blame(f"{tokenizer.name_or_path}: the chat template fails"):
        return tokenizer.apply_chat_template(turns, **options)


def load_tokenizer(path_or_hub_id: str) -> Tokenizer:
    """Load a tokenizer.json as it is. Raises InputError if it cannot be trained or sampled with."""
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer may build another tokenizer
    from transformers.utils import has_file

    nothing = f"{path_or_hub_id}: no folder, nor a hub id in reach, with a tokenizer.json"
    with blame(nothing):  # a tokenizer made from other files may give other ids
        found = has_file(path_or_hub_id, "tokenizer.json")
    if not found:
        inside = sorted(Path(path_or_hub_id).glob("*/tokenizer.json"))
        raise InputError(f"{nothing}; {inside[-1].parent}?" if inside else nothing)
    options = {"clean_up_tokenization_spaces": False}  # what is graded is what was sampled
    with blame(f"{path_or_hub_id}: its tokenizer cannot be loaded"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path_or_hub_id, **options)
    end = end_of_turn_id(tokenizer)
    if end not in tokenizer(tokenizer.decode(end), add_special_tokens=False).input_ids:
        reason = "reads special tokens as text (split_special_tokens)"
        raise InputError(f"{path_or_hub_id}: the tokenizer {reason}")
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise InputError(f"{path_or_hub_id}: the tokenizer is random: set dropout to null")
    thinking = r"(\s|</?think>)+$"  # either side may hold an opened or an empty <think>
    asked = re.sub(thinking, "", prompt_text(tokenizer, "1", ASK_FREE))
    before = re.sub(thinking, "", around_answer(tokenizer)[0])
    whole = prompt_text(tokenizer, MARK, ASK_FREE)
    if asked != before or MARK not in whole or SYSTEM_PROMPT not in whole:
        reason = "drops text, or does not end the prompt where it begins the assistant's turn"
        raise InputError(f"{path_or_hub_id}: the chat template {reason}")
    text = messages("1", ASK_FREE)[-1]["content"]
    read = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)
    if read.removeprefix(" ") != text:
        raise InputError(f"{path_or_hub_id}: the tokenizer changes text to {read!r}")
    return tokenizer


def space_before_answer(tokenizer: Tokenizer) -> str:
    """White space that the chat template writes between its prompt and an assistant's text."""
    asked = prompt_text(tokenizer, "1", ASK_FREE)
    between = around_answer(tokenizer)[0].removeprefix(asked)
    return between if between.isspace() else ""  # it may be an empty <think>, which is not learnt


def around_answer(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template writes before an assistant's text, and after it."""
    turns = [*messages("1", ASK_FREE), {"role": "assistant", "content": MARK}]
    before, found, after = render(tokenizer, turns).rpartition(MARK)
    if not found:
        raise InputError("the chat template drops the assistant's turn")
    return before, after


def end_of_turn_id(tokenizer: Tokenizer) -> int:
    """The token with which the chat template closes an assistant turn, e.g. `<|im_end|>`.

    For Qwen3-Base it is not the tokenizer's EOS (`<|endoftext|>`). Raises InputError if the
    template closes a turn with plain text, on which sampling could not stop.
    """
    after = around_answer(tokenizer)[1].lstrip()
    tokens = tokenizer.added_tokens_decoder.items()
    closing = [(token.content, id) for id, token in tokens if after.startswith(token.content)]
    if not closing:
        raise InputError("the chat template closes the assistant's turn without a special token")
    return max(closing)[1]  # the longest is meant


def stop_token_ids(tokenizer: Tokenizer, own: int | list[int] | None = None) -> list[int]:
    """Where sampling stops: the end of turn, EOS, and the model's `own`, where vLLM stops, too."""
    stops = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    stops += own if isinstance(own, list) else [own]
    return list(dict.fromkeys(token for token in stops if token is not None))


def refuse_special_tokens(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> None:
    """Raise InputError if one of the texts, given as (what it is, text), holds a special token.

    It searches the text, not the ids: a character that the vocabulary lacks has the id of `<unk>`.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}  # Qwen's `<think>` is not
    special.update(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)))
    pattern = re.compile("|".join(map(re.escape, sorted(special, reverse=True))))
    for what, text in texts:
        if found := pattern.search(text):
            raise InputError(f"{what} holds the special token '{found[0]}'")


# ---- Token ids -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and what follows it, as token ids: an expert's solution, or a model's answer."""

    id: str  # of the query
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]  # a solution ends with the end of turn, which is learnt too

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, eq=False)
class TokenizedExample(Trajectory):
    """A query with its expert trajectory. The ids are int32 arrays: 4 bytes a token."""

    example: Example


def tokenize_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, max_completion_length: int
) -> tuple[list[TokenizedExample], dict[str, int]]:
    """Turn examples into token ids; returns those that fit, and how many do not, by reason.

    Prompt and solution are tokenized together, as the template writes them. A solution by itself
    might begin with a token for a space that is not there (SentencePiece).

    Args:
        max_length: tokens of prompt and solution together, and of prompt and rollout.
        max_completion_length: tokens of a rollout, for which a prompt has to leave room, in SFT
            too; `max_length` or more turns this off.
    """
    fields = ("question", "solution")
    texts = ((f"{e.where}: field '{name}'", getattr(e, name)) for e in examples for name in fields)
    refuse_special_tokens(tokenizer, texts)
    kept, dropped = [], {"prompt_too_long": 0, "solution_too_long": 0}
    end_of_turn, space = end_of_turn_id(tokenizer), space_before_answer(tokenizer)
    room = max_completion_length if max_completion_length < max_length else 0
    for start in range(0, len(examples), TOKENIZER_BATCH):
        part = examples[start : start + TOKENIZER_BATCH]
        prompts = [prompt_text(tokenizer, e.question, instruction(e.answer)) for e in part]
        solutions = [space + solution_after(*pair) for pair in zip(prompts, part, strict=True)]
        whole = [p + s for p, s in zip(prompts, solutions, strict=True)]
        ids = [tokenizer(x, add_special_tokens=False).input_ids for x in (prompts, whole)]
        for example, solution, asked, both in zip(part, solutions, *ids, strict=True):
            learnt = both[len(asked) :]
            if both[: len(asked)] != asked:  # the prompt's end has other tokens here
                learnt = tokenizer(solution, add_special_tokens=False).input_ids
            learnt = np.array([*learnt, end_of_turn], np.int32)
            tokenized = TokenizedExample(example.id, np.array(asked, np.int32), learnt, example)
            if len(asked) > max_length - room:
                dropped["prompt_too_long"] += 1
            elif len(tokenized) > max_length:
                dropped["solution_too_long"] += 1
            else:
                kept.append(tokenized)
    return kept, dropped


def count_examples(kept: Sequence[TokenizedExample], dropped: dict[str, int]) -> str:
    """What `tokenize_examples` returned, in words: "576 examples (2 dropped: prompt_too_long)"."""
    rest = (f" ({count:,} dropped: {reason})" for reason, count in dropped.items() if count)
    return f"{len(kept):,} examples{''.join(rest)}"


def solution_after(prompt: str, example: Example) -> str:
    """The solution after this prompt, which may have opened or closed `<think>`."""
    solution = example.solution.strip()
    prompt = prompt.rstrip()
    if prompt.endswith("<think>"):
        if "</think>" not in solution:
            reason = "the chat template opens <think>, and the solution does not close it"
            raise InputError(f"{example.where}: {reason}")
        return solution.removeprefix("<think>").lstrip()
    if prompt.endswith("</think>") and solution.startswith("<think>"):
        reason = "the solution begins with <think>, which the chat template has closed before it"
        raise InputError(f"{example.where}: {reason}")
    return solution


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
    included, or its padding above `MAX_PADDING`. In the last one a rank's share may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    size = padding = 0  # of the last micro-batch: rows on each rank, and padding tokens
    for start in range(0, len(order), world_size):
        dealt = order[start : start + world_size]  # one row for each rank
        longest = lengths[batches[-1][0][0]] if batches else 0
        padding += longest - lengths[dealt[0]]
        if not batches or (size + 1) * longest > max_tokens or padding > MAX_PADDING:
            batches.append([[] for _ in range(world_size)])
            size = padding = 0
        size += 1
        for share, row in zip(batches[-1], dealt, strict=False):
            share.append(row)
    return batches


def count_rows(rows: Sequence[Trajectory], keep: torch.Tensor) -> dict[str, int]:
    """For a step's metrics: how many rows are not kept, and the tokens of the others."""
    tokens = sum(len(row) for row, kept in zip(rows, keep.tolist(), strict=True) if kept)
    return {"skipped_sequences": int((~keep).sum()), "train_tokens": tokens}


@dataclass
class MicroBatch:
    """Right-padded rows for one forward and backward; T is the longest row less one.

    Causal attention never looks right, so padding on the right needs no attention mask.
    """

    rows: torch.Tensor  # (B,) int64, the rows' places in the list that they were taken from
    input_ids: torch.Tensor  # (B, T) int64, the tokens that are read
    targets: torch.Tensor  # (B, T) int64, the token that follows each of them
    mask: torch.Tensor  # (B, T) bool, true where the target belongs to the completion
    positions: torch.Tensor  # int64, where the mask is true in the flattened (B * T,)
    is_last: bool = True  # whether the optimizer steps after its backward

    def to(self, device: torch.device) -> "MicroBatch":
        *tensors, is_last = vars(self).values()
        return MicroBatch(*(t.to(device, non_blocking=True) for t in tensors), is_last)


def collate(trajectories: Sequence[Trajectory], rows: Sequence[int]) -> MicroBatch:
    """Pack the rows with these indices. The mask goes by position, never by pad id."""
    length = max(len(trajectories[i]) for i in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for n, i in enumerate(rows):
        prompt_ids, response_ids = trajectories[i].prompt_ids, trajectories[i].response_ids
        ids = np.concatenate([prompt_ids, response_ids])
        tokens[n, : len(ids)] = torch.from_numpy(ids)
        mask[n, len(prompt_ids) : len(ids)] = True
    mask = mask[:, 1:]
    positions = mask.flatten().nonzero()[:, 0]
    return MicroBatch(torch.tensor(rows), tokens[:, :-1], tokens[:, 1:], mask, positions)
