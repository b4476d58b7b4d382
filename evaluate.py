"""How good is a model? Pass@1 and Pass@k on the paper's seven benchmarks, with error bars.

    python evaluate.py --model runs/oswft/final                   # all seven, into runs/oswft/eval
    python evaluate.py --model ... --benchmarks aime24 math500 --data_dir copies  # without the hub
    python evaluate.py --model ... --benchmark_file mine.jsonl    # rows with question and answer
    deepspeed evaluate.py --model ...                             # the same, spread over GPUs
    python evaluate.py table runs/*/eval                          # Markdown, like Table 1
    python evaluate.py compare runs/sft/eval runs/oswft/eval      # paired difference, p-value
    python evaluate.py score runs/oswft/eval                      # results.json from the samples

The protocol is the paper's (section 4.1): temperature 0.6, top-p 0.95, top-k 20, up to 8k tokens;
16 answers to each competition problem, one to each of MATH-500 and GPQA-Diamond. Every answer is
kept with its verdict in samples/<benchmark>.jsonl, and results.json follows from those files
alone. An evaluation that was stopped goes on when the same command is given again.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Literal

import numpy as np
import torch.distributed as dist
import tyro
from tqdm import tqdm

from data import (
    BENCHMARKS,
    InputError,
    Problem,
    derive_seed,
    load_benchmark,
    load_config,
    load_problems,
    load_tokenizer,
    prompt_text,
    write_rows,
)

RESAMPLES = 10_000  # of a bootstrap, and of a test
KEEP_EVERY = 1.0  # seconds between two times that finished answers are checked and written
# What makes answers comparable: another value is another evaluation, and needs another folder.
PROTOCOL = (
    *("model_version", "temperature", "top_p", "top_k", "max_completion_length"),
    *("precision", "seed"),
)


@dataclass
class Args:
    model: str  # hub id or folder
    benchmarks: tuple[str, ...] = ()  # of the paper; default: all, if no --benchmark_file is given
    benchmark_file: tuple[Path, ...] = ()  # your own: JSONL with question and answer in each row
    data_dir: Path | None = None  # has <benchmark>.jsonl, copies that stand in for the hub's
    output_dir: Path | None = None  # default: eval/ beside the model's folder

    # The protocol
    num_samples: int | None = None  # answers to a problem; default: 16 (math500, gpqa_diamond: 1)
    k: tuple[int, ...] = ()  # of pass@k in the table; default: 1 and num_samples
    temperature: float = 0.6  # of sampling; 0 takes the likeliest token
    top_p: float = 0.95  # of sampling
    top_k: int = 20  # of sampling; 0 for all tokens
    max_completion_length: int = 8192  # tokens of an answer
    seed: int = 0  # of sampling

    # The machine
    precision: Literal["bf16", "fp32"] = "bf16"  # of the model's weights
    vllm_memory: float = 0.9  # share of the GPU's (on CPU: the host's) memory for vLLM
    verifier_workers: int = 2  # processes per rank that check answers

    def check(self) -> None:
        """Raise InputError for what cannot work, before anything is loaded or written."""
        for name in ("num_samples", "max_completion_length", "verifier_workers"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("temperature", "top_k", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name} must not be below 0, got {getattr(self, name)}")
        for name in ("top_p", "vllm_memory"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"--{name} lies between 0 and 1, got {getattr(self, name)}")


# ------------------------------------------------------------------------------------------------
# Scores and their error bars


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right: 1 - C(n-c, k) / C(n, k).

    Args:
        num_samples: n, answers that were sampled.
        num_correct: c, those that were right.
        k: answers that one may give, at most n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_k_of(counts: np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """pass@k for every count of right answers, in the shape of `counts`."""
    return np.array([pass_at_k(num_samples, c, k) for c in range(num_samples + 1)])[counts]


def resampled(
    counts: np.ndarray, num_samples: int, k: int, draws: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Bootstrap values of pass@k: problems drawn anew and, for k > 1, the answers to each as well.

    Args:
        counts: (N,) right answers to each problem, of `num_samples`.
        draws: (R, N) which problem is drawn.

    Returns:
        (R,) means over the problems.
    """
    counts = counts[draws]
    if k > 1:
        counts = rng.binomial(num_samples, counts / num_samples)
    return pass_at_k_of(counts, num_samples, k).mean(axis=1)


def interval(values: np.ndarray, estimate: float, low: float, high: float) -> tuple[float, float]:
    """The middle 95 % of bootstrap values, moved so that their mean is the estimate.

    The estimate is unbiased, the values are not: answers that are drawn with replacement lose some
    of the rare right ones, and pass@16 of 16 falls.
    """
    lower, upper = np.quantile(values, (0.025, 0.975)) + (estimate - values.mean())
    return max(low, float(lower)), min(high, float(upper))


def score_with_interval(
    counts: np.ndarray, num_samples: int, k: int
) -> tuple[float, tuple[float, float]]:
    """pass@k of a benchmark, and its 95 % interval. `counts` (N,) are right answers by problem."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(counts), size=(RESAMPLES, len(counts)))
    estimate = float(pass_at_k_of(counts, num_samples, k).mean())
    return estimate, interval(resampled(counts, num_samples, k, draws, rng), estimate, 0, 1)


def paired_difference(
    first: tuple[np.ndarray, int], second: tuple[np.ndarray, int], k: int
) -> tuple[float, tuple[float, float], float]:
    """pass@k of the second less the first: the difference, its 95 % interval, a p-value.

    Each is (counts (N,), num_samples), of the same problems in the same order. The interval is a
    bootstrap that draws the same problems for both; the p-value is that of the test which swaps
    the two at random in each problem (a sign-flip permutation test, two-sided).
    """
    rng = np.random.default_rng(0)
    size = (RESAMPLES, len(first[0]))
    draws = rng.integers(len(first[0]), size=size)
    values = resampled(*second, k, draws, rng) - resampled(*first, k, draws, rng)
    differences = pass_at_k_of(*second, k) - pass_at_k_of(*first, k)
    flipped = (rng.choice((-1, 1), size=size) * differences).mean(axis=1)
    estimate = float(differences.mean())
    as_large = np.abs(flipped) >= abs(estimate) - 1e-12
    p_value = (1 + int(as_large.sum())) / (RESAMPLES + 1)
    return estimate, interval(values, estimate, -1, 1), p_value


# ------------------------------------------------------------------------------------------------
# Samples and results

FIELDS = {  # of a row of samples/<benchmark>.jsonl
    "id": str,  # of the problem
    "sample": int,  # which answer to it, counted from 0
    "correct": bool,
    "extracted": str | None,  # the answer that was read in the text
    "answer": str,  # the reference
    "finish_reason": str,  # "stop", or "length" if the token limit cut it off
    "tokens": int,
    "seconds": float,  # its share of the clock of its rank
    "text": str,
}


def read_samples(folder: Path, name: str) -> tuple[list[dict], list[str]]:
    """The good rows of a benchmark, of all ranks; and what is wrong with the others."""
    rows, damaged = {}, []
    for path in samples_files(folder, name):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    wrong = [key for key, kind in FIELDS.items() if not isinstance(row[key], kind)]
                    if wrong:
                        raise ValueError(f"field '{wrong[0]}' has another type")
                    rows[row["id"], row["sample"]] = row
                except (ValueError, KeyError, TypeError) as error:
                    reason = f"no field {error}" if isinstance(error, KeyError) else error
                    damaged.append(f"{path}:{number}: damaged ({reason})")
    return list(rows.values()), damaged


def samples_files(folder: Path, name: str) -> list[Path]:
    """The finished file, and what ranks have written since: <benchmark>.jsonl.rank0, ..."""
    found = (folder / "samples").glob("*.jsonl*")
    return sorted(path for path in found if path.name.partition(".jsonl")[0] == name)


def compute_results(folder: Path) -> tuple[dict[str, dict], list[str]]:
    """Write results.json from the samples alone; a benchmark that is not complete is left out.

    Returns the results by benchmark, and what is wrong with those that were left out.
    """
    names = {path.name.partition(".jsonl")[0] for path in (folder / "samples").glob("*.jsonl*")}
    results, complaints, tokens, seconds = {}, [], 0, 0.0
    for name in in_order(names):
        rows, damaged = read_samples(folder, name)
        answers = Counter(row["id"] for row in rows)
        num_problems = BENCHMARKS[name].num_problems if name in BENCHMARKS else len(answers)
        num_samples = max(answers.values(), default=1)
        missing = num_problems * num_samples - len(rows)
        if missing or damaged:
            complaints += [
                *damaged,
                f"{folder}: {name} is left out: {len(rows)} answers are good, {missing} missing; "
                "the same evaluation, started again, samples what is missing",
            ]
        else:
            results[name] = summarize(rows, num_samples)
            tokens += sum(row["tokens"] for row in rows)
            seconds += sum(row["seconds"] for row in rows)
    for result in results.values():  # of one device; all benchmarks are sampled side by side
        result["tokens_per_second"] = tokens / seconds
    if results:
        write_json(results, folder / "results.json")
    return results, complaints


def write_json(value: dict, path: Path) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(value, indent=2, default=str) + "\n")
    aside.rename(path)


def in_order(names: set[str]) -> list[str]:
    """The paper's benchmarks in its order, then all others."""
    return [name for name in BENCHMARKS if name in names] + sorted(names - set(BENCHMARKS))


def summarize(rows: Sequence[dict], num_samples: int) -> dict:
    """One benchmark's results: shares and scores lie in [0, 1], lengths are in tokens."""
    right = {row["id"]: 0 for row in rows}
    for row in rows:
        right[row["id"]] += row["correct"]
    counts = np.array(list(right.values()))
    results = {"problems": len(counts), "samples": num_samples}
    for k in range(1, num_samples + 1):
        results[f"pass@{k}"], results[f"pass@{k}_interval"] = score_with_interval(
            counts, num_samples, k
        )
    return {
        **results,
        "truncated_share": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "no_answer_share": sum(row["extracted"] is None for row in rows) / len(rows),
        "completion_length_mean": sum(row["tokens"] for row in rows) / len(rows),
    }


# ------------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True)
class Request:
    """One answer that is still to be sampled."""

    benchmark: str
    problem: Problem
    sample: int  # which answer to the problem, counted from 0
    prompt_ids: list[int]


def evaluate(args: Args) -> None:
    """Sample what is missing, on all ranks; then rank 0 scores and prints."""
    folder = args.output_dir or default_folder(args.model)
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:  # gloo: only lists travel. A rank may wait long for the slowest.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    requests = None
    try:
        if rank == 0:
            args.check()
            problems = load_all_problems(args)
            requests = plan(args, folder, problems)
    finally:
        requests = share(requests)
    if requests is None:
        return  # rank 0 says why
    if requests:
        sample(args, folder, requests)
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        for name in problems:
            merge(folder, name, read_samples(folder, name)[0], problems[name])
        score(folder, args.k)
        print(f"\nwritten: {folder}; pictures: python plot.py {folder}")


def default_folder(model: str) -> Path:
    """runs/oswft/eval for the folder runs/oswft/final, runs/Qwen3-4B/eval for the hub's model."""
    path = Path(model)
    return (path.parent if path.is_dir() else Path("runs", path.name)) / "eval"


def share(value):
    """Rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def load_all_problems(args: Args) -> dict[str, list[Problem]]:
    """The problems of every benchmark that was asked for, by its name."""
    names = args.benchmarks or (() if args.benchmark_file else tuple(BENCHMARKS))
    for name in names:
        if name not in BENCHMARKS:
            raise InputError(
                f"there is no benchmark '{name}': the known ones are {', '.join(BENCHMARKS)}; "
                "problems of your own are scored with --benchmark_file"
            )
    problems = {name: load_benchmark(name, args.data_dir) for name in names}
    for path in args.benchmark_file:
        own = load_problems(str(path))
        # A file that is called like a benchmark of the paper is not taken for it.
        name = f"{path.stem}_{len(own)}" if path.stem in BENCHMARKS else path.stem
        if name in problems:
            raise InputError(f"{path}: another file is called {name} as well")
        problems[name] = own
    return problems


def plan(args: Args, folder: Path, problems: dict[str, list[Problem]]) -> list[Request]:
    """Read what is there already, and list what is missing. Claims the folder."""
    num_samples = {
        name: args.num_samples or (BENCHMARKS[name].num_samples if name in BENCHMARKS else 16)
        for name in problems
    }
    for name, n in num_samples.items():
        check_k(name, args.k, n)
    tokenizer = load_tokenizer(args.model)
    prompt_ids = {
        name: tokenizer(
            [prompt_text(tokenizer, p.question, p.instruction) for p in problems[name]],
            add_special_tokens=False,
        ).input_ids
        for name in problems
    }
    longest = max(len(ids) for prompts in prompt_ids.values() for ids in prompts)
    config = load_config(args.model, longest + args.max_completion_length)
    claim(folder, args, model_version(args.model, config))

    requests = []
    for name in problems:
        done, damaged = read_samples(folder, name)
        for complaint in damaged:
            print(f"{complaint}: that answer is sampled again", file=sys.stderr)
        merge(folder, name, done, problems[name])
        there = {(row["id"], row["sample"]) for row in done}
        requests += [
            Request(name, problem, sample, ids)
            for problem, ids in zip(problems[name], prompt_ids[name], strict=True)
            for sample in range(num_samples[name])
            if (problem.id, sample) not in there
        ]
    return requests


def model_version(model: str, config) -> str:
    """A hash of a folder's weights, or the hub's commit: trained on, it is another model."""
    if not Path(model).is_dir():
        return str(config._commit_hash)
    digest = hashlib.sha256()
    for file in sorted([*Path(model).glob("*.safetensors"), *Path(model).glob("*.bin")]):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def claim(folder: Path, args: Args, version_of_model: str) -> None:
    """Write args.json. Raises InputError if the folder holds answers under another protocol."""
    settings = {**asdict(args), "model_version": version_of_model}
    path = folder / "args.json"
    if path.exists():
        before = json.loads(path.read_text())["args"]
        differing = [
            f"{name} {before[name]} -> {settings[name]}"
            for name in PROTOCOL
            if before[name] != settings[name]
        ]
        if differing:
            raise InputError(
                f"{folder} holds answers of another evaluation ({'; '.join(differing)}): choose "
                "another --output_dir"
            )
    packages = ("torch", "transformers", "math-verify", packages_distributions()["vllm"][0])
    versions = {package: version(package) for package in packages}
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    write_json({"args": settings, "versions": versions}, path)


def merge(folder: Path, name: str, rows: Sequence[dict], problems: Sequence[Problem]) -> None:
    """Put a benchmark's rows, from whatever rank, into one file in the order of its problems."""
    position = {(problem.id, problem.answer): n for n, problem in enumerate(problems)}
    for row in rows:
        if (row["id"], row["answer"]) not in position:
            raise InputError(
                f"{folder}: the problems of {name} have changed, '{row['id']}' with the answer "
                f"'{row['answer']}' is gone: choose another --output_dir"
            )
    files = samples_files(folder, name)
    rows = sorted(rows, key=lambda row: (position[row["id"], row["answer"]], row["sample"]))
    write_rows(rows, folder / "samples" / f"{name}.jsonl")
    for path in files:
        if path.name != f"{name}.jsonl":
            path.unlink()


def sample(args: Args, folder: Path, requests: Sequence[Request]) -> None:
    """Answer this rank's share of the requests, check the answers, and append them to files."""
    from rollout import Rollout  # these take seconds to import, and tables do not need them
    from verify import Verifier

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about vLLM's calls
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    longest = max(len(request.prompt_ids) for request in requests)
    rollout = Rollout(
        args.model,
        load_tokenizer(args.model),
        max_length=longest + args.max_completion_length,
        precision=args.precision,
        memory_share=args.vllm_memory,
        load_weights_from_disk=True,
    )
    bar = tqdm(
        total=len(range(rank, len(requests), world_size)),
        desc="answering" if world_size == 1 else f"answering (rank 0 of {world_size})",
        unit="answer",
        mininterval=0.5 if sys.stderr.isatty() else 10,
        disable=rank > 0,
    )
    stream = rollout.stream(
        [request.prompt_ids for request in requests],
        num_samples=1,
        max_tokens=args.max_completion_length,
        # Of one answer alone: it stays the same, whatever is sampled beside it or came before.
        seeds=[derive_seed(args.seed, r.benchmark, r.problem.id, r.sample) for r in requests],
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        logprobs=False,
    )
    pending, since = [], time.perf_counter()
    with bar, Verifier(args.verifier_workers) as verifier, contextlib.closing(stream):
        try:
            for finished in stream:
                pending += [(requests[completion.query], completion) for completion in finished]
                bar.update(len(finished))
                if pending and time.perf_counter() - since > KEEP_EVERY:
                    keep(pending, folder, rank, verifier, time.perf_counter() - since)
                    pending, since = [], time.perf_counter()
        finally:  # also when it is stopped
            if pending:
                keep(pending, folder, rank, verifier, time.perf_counter() - since)


def keep(answers: list[tuple], folder: Path, rank: int, verifier, seconds: float) -> None:
    """Check answers, each a (Request, Completion), and append them to this rank's files."""
    grades = verifier.grade(
        [completion.text for _, completion in answers],
        [request.problem.answer for request, _ in answers],
    )
    tokens = sum(len(completion.token_ids) for _, completion in answers)
    lines: dict[str, str] = {}
    for (request, completion), grade in zip(answers, grades, strict=True):
        row = {
            "id": request.problem.id,
            "sample": request.sample,
            "correct": grade.correct,
            "extracted": grade.extracted,
            "answer": request.problem.answer,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "seconds": seconds * len(completion.token_ids) / tokens,
            "text": completion.text,
        }
        line = json.dumps(row, ensure_ascii=False) + "\n"
        lines[request.benchmark] = lines.get(request.benchmark, "") + line
    for name, text in lines.items():
        with (folder / "samples" / f"{name}.jsonl.rank{rank}").open("a") as out:
            out.write(text)


# ------------------------------------------------------------------------------------------------
# Tables


def score(folder: Path, k: tuple[int, ...] = ()) -> None:
    """Compute results.json from the samples alone, and print it.

    Args:
        folder: of an evaluation.
        k: of pass@k; default: 1 and the number of samples.
    """
    results, complaints = compute_results(folder)
    if results:
        print(f"\n{'':16}{'problems':>9}{'samples':>9}  {'pass@k, % [95 % interval]':<44}", end="")
        print(f"{'truncated':>10}{'no answer':>10}{'tokens':>8}{'tokens/s':>9}")
    for name, result in results.items():
        scores = [
            f"@{n} {percent(result, n)}" for n in k or default_k(result) if f"pass@{n}" in result
        ]
        print(
            f"{name:16}{result['problems']:9}{result['samples']:9}  {'  '.join(scores):<44}"
            f"{result['truncated_share']:10.1%}{result['no_answer_share']:10.1%}"
            f"{result['completion_length_mean']:8.0f}{result['tokens_per_second']:9.0f}"
        )
    if complaints or not results:
        raise InputError("\n".join(complaints) or f"{folder}: there is no samples/*.jsonl in it")


def table(folders: tuple[Path, ...], k: tuple[int, ...] = ()) -> None:
    """Print a Markdown table like the paper's Table 1: pass@k in %, with 95 % intervals.

    Args:
        folders: of evaluations, a row for each.
        k: of pass@k; default: 1 and the number of samples.
    """
    runs = {label(folder): read_results(folder) for folder in folders}
    if len(runs) < len(folders):
        raise InputError("two of the folders have the same name")
    columns = []  # (benchmark, its k)
    for name in in_order({name for results in runs.values() for name in results}):
        having = [results[name] for results in runs.values() if name in results]
        if len({result["problems"] for result in having}) > 1:
            raise InputError(f"{name}: the evaluations have different problems")
        fewest = min(having, key=lambda result: result["samples"])
        check_k(name, k, fewest["samples"])
        columns.append((name, k or default_k(fewest)))
    heads = [
        f"{BENCHMARKS[name].title if name in BENCHMARKS else name}, "
        f"Pass{' / '.join(f'@{n}' for n in ks)}"
        for name, ks in columns
    ]
    lines = [["", *heads], ["---"] * (len(columns) + 1)]
    for run, results in runs.items():
        cells = [
            " / ".join(percent(results[name], n) for n in ks) if name in results else "–"
            for name, ks in columns
        ]
        lines.append([run, *cells])
    for line in lines:
        print(f"| {' | '.join(line)} |")


def compare(first: Path, second: Path, k: tuple[int, ...] = ()) -> None:
    """Print how much better the second evaluation is than the first, problem by problem.

    Args:
        first: folder of an evaluation.
        second: folder of another one, on the same problems.
        k: of pass@k; default: 1 and the number of samples.
    """
    names = [name for name in read_results(first) if name in read_results(second)]
    if not names:
        raise InputError(f"{first} and {second} have no benchmark in common")
    print(f"| | k | {label(first)} | {label(second)} | difference, 95 % interval | p |")
    print("|---|---|---|---|---|---|")
    for name in names:
        sides = [right_by_problem(folder, name) for folder in (first, second)]
        if sides[0][0].keys() != sides[1][0].keys():
            raise InputError(f"{name}: the two evaluations have different problems")
        ids = sorted(sides[0][0])
        pair = [(np.array([counts[id] for id in ids]), n) for counts, n in sides]
        fewest = min(n for _, n in pair)
        check_k(name, k, fewest)
        for n in k or dict.fromkeys((1, fewest)):
            scores = [100 * pass_at_k_of(counts, samples, n).mean() for counts, samples in pair]
            difference, (low, high), p_value = paired_difference(*pair, n)
            print(
                f"| {name} | {n} | {scores[0]:.1f} | {scores[1]:.1f} | {100 * difference:+.1f} "
                f"[{100 * low:+.1f}, {100 * high:+.1f}] | {p_value:.2g} |"
            )


def right_by_problem(folder: Path, name: str) -> tuple[dict[tuple[str, str], int], int]:
    """Right answers by (problem's id, reference), and how many answers each problem has."""
    rows, _ = read_samples(folder, name)
    right = Counter()
    for row in rows:
        right[row["id"], row["answer"]] += row["correct"]
    return right, len(rows) // len(right)


def read_results(folder: Path) -> dict[str, dict]:
    path = folder / "results.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; `python evaluate.py score {folder}` makes it from samples"
        ) from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: not JSON ({error}); `python evaluate.py score {folder}` makes it again"
        ) from error


def check_k(name: str, k: tuple[int, ...], num_samples: int) -> None:
    if k and not 1 <= min(k) <= max(k) <= num_samples:
        possible = "k = 1" if num_samples == 1 else f"k = 1 to {num_samples}"
        raise InputError(
            f"--k {' '.join(map(str, k))}: {num_samples} answers to a problem of {name} allow "
            f"{possible}"
        )


def default_k(result: dict) -> tuple[int, ...]:
    return tuple(dict.fromkeys((1, result["samples"])))


def percent(result: dict, k: int) -> str:
    low, high = result[f"pass@{k}_interval"]
    return f"{100 * result[f'pass@{k}']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def label(folder: Path) -> str:
    """oswft for runs/oswft/eval, else the folder's own name."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "eval" else folder.name


COMMANDS = {"table": table, "compare": compare, "score": score}


def main() -> None:
    # The deepspeed launcher adds --local_rank, which the environment says as well.
    args = [arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")]
    options = {"use_underscores": True, "config": (tyro.conf.PositionalRequiredArgs,)}
    if args and args[0] in COMMANDS:
        command = COMMANDS[args.pop(0)]
        tyro.cli(command, args=args, prog=f"evaluate.py {command.__name__}", **options)
    else:
        evaluate(tyro.cli(Args, args=args, description=__doc__, use_underscores=True))


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped: what was answered is kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
