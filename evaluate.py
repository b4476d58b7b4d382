"""How good is a model? Pass@1 and Pass@k on the paper's seven benchmarks, with error bars.

    python evaluate.py --model runs/oswft/final                   # all seven, into runs/oswft/eval
    python evaluate.py --model ... --benchmarks aime24 math500 --data_dir copies  # without the hub
    python evaluate.py --model ... --benchmark_file mine.jsonl    # rows with question and answer
    deepspeed evaluate.py --model ...                             # the same, spread over GPUs
    python -m paper.tables table runs/*/eval                      # Markdown, like Table 1
    python -m paper.tables compare runs/sft/eval runs/oswft/eval  # paired difference, p-value

The protocol is the paper's (section 4.1): temperature 0.6, top-p 0.95, top-k 20, up to 8k tokens;
16 answers to each competition problem, one to each of MATH-500 and GPQA-Diamond. Every answer is
kept with its verdict in samples/<benchmark>.jsonl, and results.json follows from those files
alone. An evaluation that was stopped goes on when the same command is given again.
"""

import datetime
import json
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch.distributed as dist
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from benchmarks import BENCHMARKS, Problem, load_benchmark, load_problems
from data import InputError, derive_seed, load_config, write_json, write_rows
from prompts import Prompt, load_tokenizer, refuse_special_tokens
from ranks import on_rank_0, share_cores, watch
from rollout import Completion, Rollout
from run import differences, model_version, read_args, run_script, write_args
from verify import Verifier

RESAMPLES = 10_000  # of a bootstrap, and of a test
KEEP_EVERY = 1.0  # seconds after which finished answers are checked and written
PROMPT = tuple(Prompt.__dataclass_fields__)  # system_prompt, prompt_suffix, date
# An evaluation with another value of one of these needs another folder.
PROTOCOL = ("temperature", "top_p", "top_k", "max_completion_length", "precision", "seed", *PROMPT)


@dataclass(kw_only=True)
class Args:
    model: str  # hub id or folder
    benchmarks: tuple[str, ...] = ()  # of the paper; default: all, if no --benchmark_file is given
    benchmark_file: tuple[Path, ...] = ()  # your own: JSONL with question and answer in each row
    data_dir: Path | None = None  # a folder with <benchmark>.jsonl, to read instead of the hub
    output_dir: Path | None = None  # default: eval/ in the run's folder, else runs/<model>/eval

    # The protocol
    num_samples: int | None = None  # answers to a problem; default: 16 (math500, gpqa_diamond: 1)
    k: tuple[int, ...] = ()  # of pass@k in the table; default: 1 and num_samples
    temperature: float = 0.6  # of sampling; 0 takes the likeliest token
    top_p: float = 0.95  # of sampling
    top_k: int = 20  # of sampling; 0 for all tokens
    max_completion_length: int = 8192  # tokens of an answer
    seed: int = 0  # of sampling

    # The prompt; default: that of the run in whose folder the model lies
    prompt_suffix: str | None = None  # follows the question instead of the instruction; "": nothing
    system_prompt: str | None = None  # a system turn before the question
    date: str | None = None  # for a template that asks for today's; else: when this began

    # The machine
    precision: Literal["bf16", "fp32"] = "bf16"  # of the model's weights
    vllm_memory: float = 0.9  # share of the GPU's (on CPU: the host's) memory for vLLM
    verifier_workers: int = 2  # processes per rank that check answers

    go_on: ClassVar[str] = "what was answered is kept: the same command goes on"

    @property
    def prompt(self) -> Prompt:
        """What a prompt holds beside the question."""
        return Prompt(self.system_prompt, self.prompt_suffix, self.date)

    def check(self) -> None:
        """Raise InputError for what cannot work, before anything is loaded or written."""
        for name in ("num_samples", "max_completion_length", "verifier_workers"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("temperature", "top_k", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
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


def pass_at_k_curve(num_samples: int, k: int) -> np.ndarray:
    """pass@k for 0, 1, ..., n right answers of n: (n + 1,)."""
    return np.array([pass_at_k(num_samples, c, k) for c in range(num_samples + 1)])


def resample(
    counts: np.ndarray, num_samples: int, problems: np.ndarray, k: int, rng: np.random.Generator
) -> np.ndarray:
    """pass@k of every problem in R data sets that are drawn anew: (R, N).

    Args:
        counts: (N,) right answers to each problem, of `num_samples`.
        problems: (R, N) which problems were drawn. For k > 1 the answers to each are drawn anew,
            too: from n answers, of which c are right, a binomial number of right ones.
    """
    drawn = counts[problems]
    if k > 1:
        drawn = rng.binomial(num_samples, drawn / num_samples)
    return pass_at_k_curve(num_samples, k)[drawn]


def middle_95(means: np.ndarray, estimate: float, least: float, most: float) -> tuple:
    """The middle 95 % of the resampled means, moved so that they centre on the estimate.

    The estimate is unbiased and the means are not: answers that are drawn with replacement lose
    some of the rare right ones, and pass@16 of 16 would come out too low.
    """
    low, high = np.quantile(means, (0.025, 0.975)) + (estimate - means.mean())
    return max(least, min(estimate, float(low))), min(most, max(estimate, float(high)))


def score_with_interval(
    counts: np.ndarray, num_samples: int, k: int
) -> tuple[float, tuple[float, float]]:
    """pass@k of a benchmark, and its 95 % bootstrap interval.

    Args:
        counts: (N,) right answers to each problem, of `num_samples`.
    """
    estimate = float(pass_at_k_curve(num_samples, k)[counts].mean())
    rng = np.random.default_rng(0)
    problems = rng.integers(len(counts), size=(RESAMPLES, len(counts)))
    means = resample(counts, num_samples, problems, k, rng).mean(axis=1)
    return estimate, middle_95(means, estimate, 0.0, 1.0)


# ------------------------------------------------------------------------------------------------
# Samples and results


@dataclass(frozen=True)
class Sample:
    """A row of samples/<benchmark>.jsonl."""

    id: str  # of the problem
    sample: int  # which answer to it, counted from 0
    correct: bool
    extracted: str | None  # the answer that was read in the text, if one could be read
    answer: str  # the reference
    finish_reason: str  # "stop", or "length" if the token limit cut it off
    tokens: int
    seconds: float  # its share of the time that its rank spent sampling
    fingerprint: str  # of the whole prompt and the reference
    text: str


def samples_files(folder: Path, name: str | None = None) -> list[Path]:
    """<benchmark>.jsonl, which is complete, and <benchmark>.jsonl.rank<n>, which ranks write.

    Of one benchmark, or of all. While a rank's file is there, the benchmark is not complete.
    """
    files = [path for path in folder.glob("samples/*") if benchmark_of(path)]
    return sorted(path for path in files if name in (None, benchmark_of(path)))


def benchmark_of(path: Path) -> str | None:
    match = re.fullmatch(r"(.+)\.jsonl(\.rank\d+)?", path.name)
    return match and match[1]


def read_samples(folder: Path, name: str) -> tuple[list[Sample], list[str]]:
    """The good rows of a benchmark, from all its files; and what is wrong with the others."""
    rows, damaged = {}, []
    for path in samples_files(folder, name):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = Sample(**json.loads(line))
                    rows[row.id, row.sample] = row
                except (ValueError, TypeError) as error:
                    damaged.append(f"{path}:{number}: damaged ({error})")
    return list(rows.values()), damaged


def complete_samples(folder: Path) -> tuple[dict[str, list[Sample]], list[str]]:
    """The rows of every complete benchmark, by name; and what is wrong with the others."""
    complete, complaints = {}, []
    names = {benchmark_of(path) for path in samples_files(folder)}
    order = [*BENCHMARKS, *read_args(folder).get("benchmarks", []), *sorted(names)]
    for name in sorted(names, key=order.index):  # the paper's first, then as they were asked for
        rows, damaged = read_samples(folder, name)
        answers = Counter(row.id for row in rows)
        num_problems = BENCHMARKS[name].num_problems if name in BENCHMARKS else len(answers)
        finished = samples_files(folder, name) == [folder / "samples" / f"{name}.jsonl"]
        alike = len(set(answers.values())) == 1  # every problem has the same number of answers
        if finished and alike and not damaged and len(answers) == num_problems:
            complete[name] = rows
        else:
            complaints += [
                *damaged,
                f"{folder}: {name} is not complete, {len(rows)} answers are good: the evaluation, "
                "started again with the same arguments, samples the others",
            ]
    if not names:
        complaints.append(f"{folder}: there are no samples/*.jsonl in it")
    return complete, complaints


def count_right(rows: Sequence[Sample]) -> dict[tuple[str, str], int]:
    """Right answers to each problem, by its id and fingerprint."""
    counts = Counter()
    for row in rows:
        counts[row.id, row.fingerprint] += row.correct
    return counts


def summarize(rows: Sequence[Sample]) -> dict:
    """One benchmark's results: shares and scores lie in [0, 1], lengths are in tokens."""
    counts, num_samples = np.array(list(count_right(rows).values())), num_answers(rows)
    results = {"problems": len(counts), "samples": num_samples}
    for k in range(1, num_samples + 1):
        score, bounds = score_with_interval(counts, num_samples, k)
        results |= {f"pass@{k}": score, f"pass@{k}_interval": bounds}
    return {
        **results,
        "truncated_share": sum(row.finish_reason == "length" for row in rows) / len(rows),
        "no_answer_share": sum(row.extracted is None for row in rows) / len(rows),
        "completion_length_mean": sum(row.tokens for row in rows) / len(rows),
    }


# ------------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True)
class Request:
    """One answer that is still to be sampled."""

    benchmark: str
    problem: Problem
    fingerprint: str
    sample: int  # which answer to the problem, counted from 0
    prompt_ids: list[int]


def evaluate(args: Args) -> int:
    """Sample what is missing, on all ranks; rank 0 scores and prints. Returns the exit status."""
    if "RANK" in os.environ:  # gloo: only lists travel. A rank may wait long for the slowest.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
        watch(args.go_on)
    args.check()
    folder = args.output_dir or default_folder(args.model)
    problems, missing = on_rank_0(lambda: find_missing(args, folder))
    if missing:
        answer_requests(args, folder, missing)
    if dist.is_initialized():
        dist.barrier()
    if int(os.environ.get("RANK", 0)) == 0:
        for name in problems:
            merge(folder, name, problems[name])
        for complaint in score_and_print(folder, args.k):  # of what was not asked for now
            print(f"note: {complaint}", file=sys.stderr)
        print(f"\nwritten: {folder}; pictures: python -m paper.plot {shlex.quote(str(folder))}")
    return 0


def run_of(model: str) -> Path | None:
    """The folder of the training run in which a model lies, if it lies in one."""
    folder = Path(model).resolve().parent
    record = read_args(folder) if Path(model).is_dir() else {}
    return folder if "args" in record and "protocol" not in record else None


def default_folder(model: str) -> Path:
    """Where an evaluation goes. In a run: eval/ for final/, eval-checkpoint-000050/ for that one.

    Of any other model: runs/Qwen3-4B/eval for /models/Qwen3-4B as for Qwen/Qwen3-4B of the hub.
    """
    name, run = Path(model).resolve().name, run_of(model)
    if run is None:
        return Path("runs", name, "eval")
    return run / ("eval" if name == "final" else f"eval-{name}")


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
        own = load_problems(path)
        # A file with the name of a benchmark of the paper is not that benchmark.
        name = f"{path.stem}_{len(own)}" if path.stem in BENCHMARKS else path.stem
        if name in problems:
            raise InputError(f"{path}: another file is called {name} as well")
        problems[name] = own
    return problems


def find_missing(args: Args, folder: Path) -> tuple[dict[str, list[Problem]], list[Request]]:
    """Claim the folder and read what is there: all problems by benchmark, and what is missing."""
    problems = load_all_problems(args)
    num_samples = {
        name: args.num_samples or (BENCHMARKS[name].num_samples if name in BENCHMARKS else 16)
        for name in problems
    }
    choose_k(args.k, num_samples)
    tokenizer = load_prompt(args, folder)
    prompts = {n: tokenize_prompts(args.prompt, tokenizer, n, problems[n]) for n in problems}
    longest = max(len(prompt) for name in prompts for prompt in prompts[name])
    asked = (
        f"--max_completion_length {args.max_completion_length} with a prompt of {longest} tokens"
    )
    load_config(args.model, longest + args.max_completion_length, asked)  # is there room?
    there = claim(folder, args, problems)

    requests = []
    for name in problems:
        done = {(row.id, row.sample) for row in there[name]}
        begun = 1 + max((sample for _, sample in done), default=-1)
        if begun > num_samples[name]:
            print(f"{name}: {begun} answers to a problem were begun, all get as many")
        missing = [
            Request(name, problem, problem.fingerprint(args.prompt), sample, prompt_ids)
            for sample in range(max(num_samples[name], begun))
            for problem, prompt_ids in zip(problems[name], prompts[name], strict=True)
            if (problem.id, sample) not in done
        ]
        if missing:  # the good rows become rank 0's file, and the damaged ones go
            (folder / "results.json").unlink(missing_ok=True)
            files = samples_files(folder, name)
            part = folder / "samples" / f"{name}.jsonl.rank0"
            write_rows([vars(row) for row in there[name]], part)
            for path in files:
                if path != part:
                    path.unlink()
        requests += missing
    return problems, requests


def load_prompt(args: Args, folder: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer; fills in what `args` leaves open of the prompt.

    It is then that of the run in whose folder the model lies, and the date may also be the one
    on which the evaluation in `folder` began.
    """
    begun, run = read_args(folder).get("protocol", {}), run_of(args.model)
    trained = read_args(run)["args"] if run else {}
    for name in PROMPT:
        if getattr(args, name) is None:
            setattr(args, name, trained.get(name))
    args.date = args.date or begun.get("date") or datetime.date.today().isoformat()
    tokenizer = load_tokenizer(args.model, args.prompt)
    if "strftime_now" not in str(tokenizer.chat_template):
        args.date = None  # evaluations of different days are alike
    return tokenizer


def tokenize_prompts(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, name: str, problems: Sequence[Problem]
) -> list[list[int]]:
    """The token ids of a benchmark's prompts. Raises InputError if one holds special tokens."""
    refuse_special_tokens(tokenizer, ((f"{name}: '{p.id}'", p.question) for p in problems))
    texts = [prompt.text(tokenizer, p.question, p.instruction) for p in problems]
    return tokenizer(texts, add_special_tokens=False).input_ids


def good_samples(
    folder: Path, name: str, problems: Sequence[Problem], prompt: Prompt
) -> list[Sample]:
    """What is there of a benchmark. Raises InputError if it answers other problems."""
    rows, damaged = read_samples(folder, name)
    for complaint in damaged:
        print(f"{complaint}: left out", file=sys.stderr)
    fingerprints = {problem.id: problem.fingerprint(prompt) for problem in problems}
    for row in rows:
        if fingerprints.get(row.id) != row.fingerprint:
            raise InputError(
                f"{folder} holds answers to other problems of {name} ('{row.id}' is another one, "
                "or gone): choose another --output_dir"
            )
    return rows


def claim(folder: Path, args: Args, problems: dict[str, list[Problem]]) -> dict[str, list[Sample]]:
    """Write args.json; returns the good samples that are there of each benchmark.

    Raises InputError if the folder holds a run, or another evaluation.
    """
    protocol = {name: getattr(args, name) for name in PROTOCOL}
    protocol["model_version"] = model_version(args.model)
    before = read_args(folder)
    if before and "protocol" not in before:
        raise InputError(f"{folder} holds a training run: choose another --output_dir")
    differing = differences(before.get("protocol", protocol), protocol)
    if differing and any(path.stat().st_size for path in samples_files(folder)):
        raise InputError(
            f"{folder} holds another evaluation ({'; '.join(differing)}): choose another "
            "--output_dir"
        )
    there = {name: good_samples(folder, name, problems[name], args.prompt) for name in problems}
    names = list(dict.fromkeys([*before.get("benchmarks", []), *problems]))  # as they were asked
    record = {"protocol": protocol, "benchmarks": names, "args": asdict(args)}
    write_args(folder, **{**before, **record})
    (folder / "samples").mkdir(exist_ok=True)
    return there


def merge(folder: Path, name: str, problems: Sequence[Problem]) -> None:
    """Put the rows of all ranks into one file, in the order of the problems: it is complete."""
    position = {problem.id: n for n, problem in enumerate(problems)}
    rows, _ = read_samples(folder, name)
    rows.sort(key=lambda row: (position[row.id], row.sample))
    write_rows([vars(row) for row in rows], folder / "samples" / f"{name}.jsonl")
    for path in samples_files(folder, name):
        if path.suffix != ".jsonl":
            path.unlink()


def answer_requests(args: Args, folder: Path, requests: Sequence[Request]) -> None:
    """Answer this rank's share of the requests, check the answers, and append them to files."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about vLLM's calls
    share_cores()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    longest = max(len(request.prompt_ids) for request in requests)
    verifier = Verifier(args.verifier_workers)  # starts while vLLM does
    rollout = Rollout(
        args.model,
        load_tokenizer(args.model),
        max_length=longest + args.max_completion_length,
        precision=args.precision,
        memory_share=args.vllm_memory,
        load_weights_from_disk=True,
    )
    if rank == 0:
        write_args(folder, **{**read_args(folder), "vllm_runner": rollout.model_runner})
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
        # A seed for each answer: it does not depend on what was sampled before a kill.
        seeds=[derive_seed(args.seed, r.benchmark, r.problem.id, r.sample) for r in requests],
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
    )
    answers, since = [], time.perf_counter()
    with bar, closing(stream), verifier:
        for finished in stream:
            answers += [(requests[completion.query], completion) for completion in finished]
            bar.update(len(finished))
            if answers and time.perf_counter() - since > KEEP_EVERY:
                keep(answers, folder, rank, verifier, time.perf_counter() - since)
                answers, since = [], time.perf_counter()
        if answers:
            keep(answers, folder, rank, verifier, time.perf_counter() - since)


def keep(
    answers: list[tuple[Request, Completion]],
    folder: Path,
    rank: int,
    verifier: Verifier,
    seconds: float,
) -> None:
    """Check answers, and append them with their verdicts to this rank's files."""
    grades = verifier.grade(
        [completion.text for _, completion in answers],
        [request.problem.answer for request, _ in answers],
    )
    tokens = sum(len(completion.token_ids) for _, completion in answers)
    lines: dict[str, str] = {}
    for (request, completion), grade in zip(answers, grades, strict=True):
        row = Sample(
            id=request.problem.id,
            sample=request.sample,
            correct=grade.correct,
            extracted=grade.extracted,
            answer=request.problem.answer,
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            seconds=seconds * len(completion.token_ids) / tokens,
            fingerprint=request.fingerprint,
            text=completion.text,
        )
        line = json.dumps(vars(row), ensure_ascii=False) + "\n"
        lines[request.benchmark] = lines.get(request.benchmark, "") + line
    for name, text in lines.items():
        with (folder / "samples" / f"{name}.jsonl.rank{rank}").open("a", encoding="utf-8") as out:
            out.write(text)


# ------------------------------------------------------------------------------------------------
# Results


def score_and_print(folder: Path, k: tuple[int, ...]) -> list[str]:
    """Write results.json from the samples alone, and print it; returns what is not complete."""
    samples, complaints = complete_samples(folder)
    if not samples:
        (folder / "results.json").unlink(missing_ok=True)
        raise InputError("\n".join(complaints))
    chosen = choose_k(k, {name: num_answers(rows) for name, rows in samples.items()})
    every = [row for rows in samples.values() for row in rows]
    speed = sum(row.tokens for row in every) / math.fsum(row.seconds for row in every)
    results = {
        # All benchmarks are sampled side by side, so they share one speed: that of one device.
        name: {**summarize(rows), "tokens_per_second": speed}
        for name, rows in samples.items()
    }
    write_json(results, folder / "results.json")

    print(f"\n{'':16}problems answers truncated no answer tokens  pass@k in % [95 % interval]")
    for name, result in results.items():
        scores = [
            f"@{n} {percent(result[f'pass@{n}'], result[f'pass@{n}_interval'])}"
            for n in chosen[name]
        ]
        print(
            f"{name:16}{result['problems']:8}{result['samples']:8}{result['truncated_share']:10.1%}"
            f"{result['no_answer_share']:10.1%}{result['completion_length_mean']:7.0f}  "
            + "  ".join(scores)
        )
    print(f"{speed:,.0f} tokens/s on one device")
    return complaints


def num_answers(rows: Sequence[Sample]) -> int:
    """To each problem."""
    return len(rows) // len(count_right(rows))


def choose_k(k: tuple[int, ...], num_samples: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The k of pass@k for each benchmark: 1 and all samples, or those of `k` that it allows."""
    most = max(num_samples.values())
    if k and not 1 <= min(k) <= max(k) <= most:
        raise InputError(
            f"--k {' '.join(map(str, k))}: {most} answers to a problem allow "
            f"{'k = 1 to ' if most > 1 else 'k = '}{most}"
        )
    return {
        name: tuple(m for m in k if m <= n) if k else tuple(dict.fromkeys((1, n)))
        for name, n in num_samples.items()
    }


def percent(score: float, bounds: tuple[float, float], sign: str = "") -> str:
    return "{:{s}.1f} [{:{s}.1f}, {:{s}.1f}]".format(
        100 * score, *(100 * bound for bound in bounds), s=sign
    )


if __name__ == "__main__":
    run_script(evaluate, Args, __doc__)
