"""Weigh a training set once, before training: static weights, own answers, suspect references.

    python -m prepare.weigh --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl --output data/weighted.jsonl
    deepspeed --quiet --module prepare.weigh --model ...      # several GPUs, the same flags
    deepspeed --quiet train_sft.py --model Qwen/Qwen3-0.6B-Base --data data/weighted.jsonl --weight_column weight

The model answers each question K times, as in OSW-FT's rollouts; p-hat is the share of right answers.
A row is suspect if its answers agree with each other, and not with its reference. The answers stay
beside the output, in weighted.answers/: the same command continues a weighing that was stopped. It
grades all answers anew; one with another --agreement, or with --own_answers, samples nothing again.
"""  # noqa: E501

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import evaluate
import train_oswft
from data import Example, InputError, Queries, Query, load_examples, write_json, write_rows
from launch import check_solutions, run_script
from models import Tokenizer, count_examples, load_tokenizer, tokenize_examples
from ranks import init_ranks, on_rank_0
from run import warn_of_answers
from verify import Verifier

import numpy as np
import torch.distributed as dist


@dataclass(kw_only=True)
class Args:
    model: str  # hub id or folder: the one that is to be trained
    data: str  # path to JSONL, or hub id
    output: Path  # the training set with its weights: .jsonl
    answers: Path | None = None  # a folder that several outputs share; default: <output>.answers
    own_answers: bool = False  # the model's first right answer in place of the expert's solution
    never_solved: Literal["keep", "drop"] = "keep"  # rows that no answer solves
    suspects: Literal["keep", "drop"] = "keep"  # rows whose answers agree on a wrong answer
    agreement: float = 0.75  # share of a row's answers that agree, in a suspect

    # Sampling: settings of the training scripts
    num_rollouts: int = 4  # K answers to a question; weights need 2, suspects 4 or more
    temperature: float = train_oswft.Args.temperature  # of sampling
    max_length: int = train_oswft.Args.max_length  # tokens of prompt and solution, or rollout
    max_completion_length: int = train_oswft.Args.max_completion_length  # tokens of a rollout
    seed: int = 0  # of sampling
    precision: Literal["bf16", "fp32"] = "bf16"  # of the model's weights
    vllm_memory: float = 0.9  # share of the GPU's memory (on a CPU: the available) for vLLM
    verifier_workers: int = 2  # processes per rank that check answers
    reward: str | None = None  # file.py:function of your own, in place of the verifier


# ---- What K answers to each of N questions say ---------------------------------------------------


def agreed_answers(
    extracted: Sequence[Sequence[str | None]], right: np.ndarray, score: Callable, share: float
) -> list[tuple[str, int] | None]:
    """The wrong answer that `share` of a row's K answers agree on, and how many; or None: (N,).

    Args:
        extracted: (N, K) what was read in each answer.
        right: (N, K) which of them agree with the reference.
        score: the verifier's, which says whether two answers are equal.
    """
    least = max(2, math.ceil(share * right.shape[1] - 1e-9))
    found = []
    for texts, are_right in zip(extracted, right, strict=True):
        wrong = [x for x, is_right in zip(texts, are_right, strict=True) if x and not is_right]
        # Any `least` of them that agree include one of these.
        first = dict.fromkeys(wrong[: max(0, len(wrong) - least + 1)])
        pairs = [(a, b) for a in first for b in {*wrong} - {a}]
        verdicts = score([rf"\boxed{{{a}}}" for a, _ in pairs], [b for _, b in pairs])
        equal = set(itertools.compress(pairs, verdicts))  # of different texts: 1/2 and 0.5
        counts = {a: sum(a == b or (a, b) in equal for b in wrong) for a in first}
        text = max(counts, key=counts.get, default=None)
        found.append((text, counts[text]) if text and counts[text] >= least else None)
    return found


# ---- The answers ---------------------------------------------------------------------------------


def weigh(args: Args) -> int:
    """Sample what is missing, and grade, on all ranks; rank 0 writes the set."""
    init_ranks("gloo", timeout=timedelta(days=1))  # At the end, ranks wait for the slowest.
    tokenizer = load_tokenizer(args.model)
    rows = on_rank_0(lambda: load_rows(args, tokenizer))
    problems = [as_problem(row.example) for row in rows]
    with Verifier(args.verifier_workers, reward=args.reward) as verifier:
        check_solutions(verifier, rows, most=len(rows))
    folder = args.answers or args.output.with_suffix(".answers")
    graded = evaluate.answer(sampling_args(args), folder, tokenizer, problems)
    if dist.get_rank() == 0:
        k = args.num_rollouts
        answers = [graded[n * k :][:k] for n in range(len(rows))]
        write_set(args, tokenizer, rows, answers)
    return 0


def sampling_args(args: Args) -> evaluate.Args:
    """The sampling as an evaluation, without top-p and top-k."""
    names = ("model", "temperature", "max_completion_length", "seed", "precision", "vllm_memory")
    names += ("verifier_workers", "reward")
    shared = {name: getattr(args, name) for name in names}
    return evaluate.Args(**shared, num_samples=args.num_rollouts, top_p=1.0, top_k=0)


def load_rows(args: Args, tokenizer: Tokenizer) -> list[Query]:
    """Check the arguments; the rows that training with these lengths would keep."""
    output = args.output.resolve()
    if not args.output.name or output.is_dir() or output == Path(args.data).resolve():
        raise InputError(f"--output {args.output}: name another file than --data")
    if args.suspects == "drop" and (args.num_rollouts < 2 or args.reward):
        raise InputError("--suspects drop needs --num_rollouts of 2 at least, and no --reward")
    if not 0 < args.agreement <= 1 or min(args.num_rollouts, args.verifier_workers) < 1:
        raise InputError("--agreement is a share; --num_rollouts, --verifier_workers are 1 or more")
    if args.max_completion_length >= args.max_length:
        raise InputError("--max_length has to be above --max_completion_length")
    lengths = args.max_length, args.max_completion_length
    examples = load_examples(args.data)
    for example in examples:  # before hours of sampling
        try:
            json.dumps(example.columns, ensure_ascii=False).encode()
        except (TypeError, UnicodeError) as error:
            raise InputError(f"{example.where}: a column cannot be written: {error}") from error
    rows, dropped = tokenize_examples(examples, tokenizer, *lengths)
    print(count_examples(rows, dropped), file=sys.stderr)
    if not rows:
        raise InputError(f"{args.data}: no row is left")
    return rows


def as_problem(example: Example) -> Example:
    """The row as evaluate.py asks it: no benchmark of the paper has this name."""
    extra = {**example.extra, "source": example.source}  # for a reward function, which reads all
    return replace(example, source="training set", extra=extra)


# ---- The set -------------------------------------------------------------------------------------


def write_set(args: Args, tokenizer: Tokenizer, rows: Queries, answers: list[list[dict]]) -> None:
    """Write the weighted rows, the suspects and a report from K answers each; print a table."""
    examples = [row.example for row in rows]

    def column(name: str) -> list[list]:  # (N, K)
        return [[answer[name] for answer in own] for own in answers]

    texts, extracted, right = column("text"), column("extracted"), np.array(column("correct"))
    rewards = np.array(column("reward")) if args.reward else right
    warn_of_answers({"ungraded_share": np.mean(column("ungraded"))})
    pass_rates = rewards.mean(axis=1)
    weights = 1 - pass_rates
    usable = right & (np.array(column("finish_reason")) == "stop")
    for n, k in zip(*usable.nonzero(), strict=True):
        if not usable[n, :k].any():
            usable[n, k] = is_trainable(replace(examples[n], solution=texts[n][k]), tokenizer, args)
    solved, own_solved = right.any(axis=1), usable.any(axis=1)
    with Verifier(args.verifier_workers) as verifier:
        agreed = agreed_answers(extracted, right, verifier.score, args.agreement)

    if own := {"weight", "pass_rate", "answers"} & {c for e in examples for c in e.extra}:
        print(f"note: the rows' own columns {', '.join(sorted(own))} are replaced", file=sys.stderr)
    written, suspects = [], []
    for n, example in enumerate(examples):
        said = {"weight": float(weights[n]), "pass_rate": float(pass_rates[n])}
        row = {**example.columns, **said, "answers": args.num_rollouts}
        if agreed[n]:
            text, count = agreed[n]
            shown = {"agreed": text, "agreeing": count}
            shown["completion"] = texts[n][extracted[n].index(text)]
            suspects.append({**row, **shown})
        drop = agreed[n] and args.suspects == "drop"
        if not drop and (solved[n] or args.never_solved == "keep"):
            if args.own_answers and own_solved[n]:
                row["solution"] = texts[n][usable[n].argmax()]  # the first one
            written.append(row)
    write_rows(written, args.output)
    listed = args.output.with_suffix(".suspects.jsonl")
    write_rows(sorted(suspects, key=lambda row: -row["agreeing"]), listed)
    record = {**asdict(args), "tokenizer": args.model}  # for look.training_set
    write_json({"arguments": record}, args.output.with_suffix(".report.json"))

    tokens = np.array([len(row.response_ids) for row in rows])  # of the expert's solutions
    print(f"\n{'weight':>8}{'rows':>10}{'tokens':>14}  share of the tokens")
    for name, kind in ("0", weights == 0), ("between", weights % 1 > 0), ("1", weights == 1):
        part = tokens[kind].sum()
        print(f"{name:>8}{kind.sum():>10,}{part:>14,}{part / tokens.sum():>8.1%}")
    print(f"\nweight of an average token: {weights @ tokens / tokens.sum():.3f}")
    none = (solved & ~own_solved).sum()
    model, output, listed = (shlex.quote(str(x)) for x in (args.model, args.output, listed))
    print(f"own answers: {own_solved.sum():,} rows have one; {none:,} have none to train on")
    print(f"never solved: {(~solved).sum():,} rows")
    print(f"suspects: {len(suspects):,} rows: python -m look.training_set suspect {listed}")
    train = f"python train_sft.py --model {model} --data {output} --weight_column weight"
    train += f" --max_length {args.max_length} --max_completion_length {args.max_completion_length}"
    print(f"written: {args.output}, {len(written):,} rows; {train} --precision {args.precision}")


def is_trainable(example: Example, tokenizer: Tokenizer, args: Args) -> bool:
    """Whether training takes this solution: it holds no special token, and is not too long."""
    try:
        return bool(tokenize_examples([example], tokenizer, args.max_length, args.max_length)[0])
    except InputError:
        return False


if __name__ == "__main__":
    run_script(weigh, Args, __doc__)
