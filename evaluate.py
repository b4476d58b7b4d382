"""How good is a model? Pass@1 and Pass@k on the paper's seven benchmarks, with error bars.

    deepspeed --quiet evaluate.py --model runs/oswft/final        # all seven, into runs/oswft/eval
    python evaluate.py --model ... --benchmark_file mine.jsonl    # rows with question and answer
    python -m look.tables table runs/*/eval                       # Markdown, like Table 1
    python -m look.tables compare runs/sft/eval runs/oswft/eval   # paired difference, p-value

The protocol is the paper's (section 4.1): temperature 0.6, top-p 0.95, top-k 20, up to 8k tokens;
16 answers to each competition problem, one to each of MATH-500 and GPQA-Diamond. Answers are kept,
verdicts are not: the same command samples what is missing, and grades all answers anew.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Literal

import cpu
import data
import models
import verify
from data import Example, InputError, blame, check_numbers
from engine import MAX_VLLM_GAP
from launch import check_hosts, run_script
from logprobs import own_logprobs
from models import Tokenizer
from ranks import gather, init_ranks, on_rank_0
from rollout import Completion, Rollout, RolloutArgs
from run import claim, provenance, read_args, warn_of_answers, write_args

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import hf_hub_download
from tqdm import tqdm

Z = 1.96  # standard deviations on either side of 95 %
ANSWERS = "answers.rank*.jsonl"
CHUNK = 64  # answers that are graded between two updates of the progress bar


@dataclass(kw_only=True)
class Args:
    model: str  # hub id or folder
    benchmarks: tuple[str, ...] = ()  # the paper's; default: all, if no --benchmark_file is given
    benchmark_file: tuple[Path, ...] = ()  # your own: JSONL with question and answer in each row
    data_dir: Path | None = None  # a folder with <benchmark>.jsonl, to read instead of the hub
    output_dir: Path | None = None  # default: eval/ in the run's folder, else runs/<model>/eval

    # The protocol
    num_samples: int | None = None  # per problem; default: 16 (math500, gpqa_diamond, greedy: 1)
    temperature: float = 0.6  # sampling temperature; 0 takes the likeliest token
    top_p: float = 0.95  # sample from the likeliest tokens that make up this share
    top_k: int = 20  # sample from so many of the likeliest tokens; 0 for all
    max_completion_length: int = 8192  # tokens of an answer
    seed: int = 0  # decides what is sampled

    # The machine
    precision: Literal["bf16", "fp32"] = "bf16"  # of the model's weights
    vllm_memory: float = 0.9  # share of the GPU's memory (on a CPU: the available) for vLLM
    verifier_workers: int = 2  # processes per rank that check answers
    reward: str | None = None  # file.py:function of your own, which gives 1 to a right answer

    @property
    def sampling(self) -> dict[str, float]:
        """How answers are sampled, as `Rollout.generate` takes it."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


Problems = Sequence[Example]
Missing = list[tuple[Example, int]]  # a problem, and the number of its answer
Interval = tuple[float, float]  # its bounds

# Changing any of these needs a new folder.
PROTOCOL = ("temperature", "top_p", "top_k", "max_completion_length", "precision", "seed")


# ---- Scores and their error bars -----------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right: 1 - C(n-c, k) / C(n, k).

    n is `num_samples`, c is `num_correct`. Raises ValueError if k is not between 1 and n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_k_curve(num_samples: int, k: int) -> np.ndarray:
    """pass@k for 0, 1, ..., n right answers of n: (n + 1,)."""
    return np.array([pass_at_k(num_samples, c, k) for c in range(num_samples + 1)])


def score_with_interval(counts: np.ndarray, num_samples: int, k: int) -> tuple[float, Interval]:
    """pass@k in [0, 1] from counts (N,) of right answers, and its 95 % interval (Wilson's)."""
    size = len(counts)
    scores = pass_at_k_curve(num_samples, k)[counts]
    mean, variance = float(scores.mean()), float(scores.var())
    # So many independent answers would give the mean this variance.
    n = size * mean * (1 - mean) / variance if np.ptp(scores) else size
    n = min(max(n, size), size * num_samples)
    centre = mean + Z**2 / (2 * n)
    spread = Z * math.sqrt(mean * (1 - mean) / n + (Z / n / 2) ** 2)
    low, high = ((centre + side * spread) / (1 + Z**2 / n) for side in (-1, 1))
    return mean, (max(0.0, min(low, mean)), min(1.0, max(high, mean)))


# ---- Problems: examples without a solution, whose source is the benchmark ------------------------


@dataclass(frozen=True)
class Benchmark:
    title: str
    hub_id: str
    split: str
    num_problems: int
    num_samples: int  # answers to each problem
    columns: tuple[str, ...] = ("problem", "answer")  # the wrong options follow, if any
    year: str = ""  # only the problems of this year


AMC = "scottgeng00/amc_22-24"
GPQA = "Idavidrein/gpqa:gpqa_diamond"
OPTIONS = ("Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))
BENCHMARKS = {
    "aime24": Benchmark("AIME 24", "HuggingFaceH4/aime_2024", "train", 30, 16),
    "aime25": Benchmark("AIME 25", "math-ai/aime25", "test", 30, 16),
    "amc22": Benchmark("AMC 22", AMC, "test", 43, 16, year="2022"),
    "amc23": Benchmark("AMC 23", AMC, "test", 46, 16, year="2023"),
    "amc24": Benchmark("AMC 24", AMC, "test", 45, 16, year="2024"),
    "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500", "test", 500, 1),
    "gpqa_diamond": Benchmark("GPQA-Diamond", GPQA, "train", 198, 1, OPTIONS),
}


def load_benchmark(name: str, data_dir: Path | None = None) -> list[Example]:
    """The problems of a benchmark, from the hub or from `<data_dir>/<name>.jsonl`."""
    benchmark = BENCHMARKS[name]
    source = str(data_dir / f"{name}.jsonl") if data_dir else benchmark.hub_id
    problems = read_benchmark(name, data.read_rows(source, benchmark.split))
    if len(problems) != benchmark.num_problems:
        reason = f"has {len(problems)} problems, but {name} has {benchmark.num_problems}"
        raise InputError(f"{source}: {reason}; --benchmark_file takes problems of your own")
    return problems


def read_benchmark(name: str, rows: Iterable[tuple[str, dict]]) -> list[Example]:
    """Turn (where, row) of a benchmark's source into problems. "problem" may be "question"."""
    benchmark, problems = BENCHMARKS[name], []
    for where, row in rows:
        if benchmark.year and str(row.get("year", benchmark.year)) != benchmark.year:
            continue
        row = {"problem": row["question"], **row} if "question" in row else row
        question, answer, *wrong = data.get_texts(where, row, *benchmark.columns)
        if wrong:
            question, answer = with_options(question, answer, wrong)
        problems.append(Example(f"{name}-{len(problems)}", question, "", answer, name, where=where))
    return problems


def with_options(question: str, right: str, wrong: Sequence[str]) -> tuple[str, str]:
    """A question with labelled options, in the order of a hash, and the letter of the right one."""
    options = sorted([right, *wrong], key=lambda o: sha256(f"{question}\n{o}".encode()).digest())
    lines = [f"({label}) {option}" for label, option in zip("ABCD", options, strict=True)]
    return "\n".join([question, "", *lines]), "ABCD"[options.index(right)]


def load_problems(args: Args) -> list[Example]:
    """The problems of the chosen benchmarks."""
    names = args.benchmarks or (() if args.benchmark_file else tuple(BENCHMARKS))
    if unknown := set(names) - set(BENCHMARKS):
        raise InputError(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    problems = [problem for name in names for problem in load_benchmark(name, args.data_dir)]
    for path in args.benchmark_file:
        if path.stem in {*BENCHMARKS, *(problem.source for problem in problems)}:
            raise InputError(f"{path}: another benchmark has this name: rename the file")
        problems += data.load_examples(str(path), solution="", source=path.stem)
    return problems


def ask(problem: Example) -> str:
    """What the prompt asks for. In MATH-500 the answer "E" is not a letter of a choice."""
    if problem.source not in BENCHMARKS:
        return models.instruction(problem.answer)
    return models.ASK_LETTER if problem.source == "gpqa_diamond" else models.ASK_FREE


def key_of(problem: Example) -> str:
    """What an answer belongs to: a hash of the benchmark, the id and the prompt."""
    key = [problem.source, problem.id, models.messages(problem.question, ask(problem))]
    return sha256(json.dumps(key).encode()).hexdigest()[:16]


# ---- Open the folder -----------------------------------------------------------------------------


def evaluate(args: Args) -> int:
    """Evaluate on all ranks; rank 0 writes and prints. Returns the exit status."""
    init_ranks("gloo", timeout=timedelta(days=1))  # At the end, ranks wait for the slowest.
    tokenizer = models.load_tokenizer(args.model)  # First: the benchmarks may take long.
    problems = on_rank_0(lambda: load_problems(args))
    folder = args.output_dir or default_folder(args.model)
    rows = answer(args, folder, tokenizer, problems)
    if dist.get_rank() == 0:
        report(args, folder, rows)
    return 0


def answer(args: Args, folder: Path, tokenizer: Tokenizer, problems: Problems) -> list[dict]:
    """Sample what the folder lacks, and grade all; returns a row for each. A collective."""
    missing = on_rank_0(lambda: open_folder(args, folder, problems))
    check_hosts(folder)
    if missing:
        sample(args, folder, tokenizer, missing)
    dist.barrier()
    return grade(args, folder, problems)


def default_folder(model: str) -> Path:
    """<run>/eval for <run>/final, <run>/eval-x for <run>/x; else runs/<model>/eval."""
    run, name = Path(model).parent, Path(model).name
    inside = run / ("eval" if name == "final" else f"eval-{name}")
    return inside if read_args(run) else Path("runs", name, "eval")


def model_version(model: str) -> str:
    """A hash of a folder's weights, config and tokenizer, or the hub's commit."""
    if not Path(model).is_dir():
        return Path(hf_hub_download(model, "config.json")).parent.name
    digest = sha256()
    for path in sorted(Path(model).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".txt"):
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_answers(paths: Iterable[Path]) -> dict[tuple[str, int], dict]:
    """The answers in these files, each once, by `key_of` the problem and number."""
    answers = {}
    for path in sorted(paths):
        for line in path.read_bytes().split(b"\n")[:-1]:  # A kill may leave half a row at the end.
            row = json.loads(line)
            answers[row["problem"], row["sample"]] = row
    return answers


def answers_of(args: Args, problems: Problems) -> dict[tuple[str, int], Example]:
    """The problem of each answer that is asked for, by `key_of` it and the answer's number."""
    asked = {}
    for key, problem in zip(map(key_of, problems), problems, strict=True):
        own = BENCHMARKS[problem.source].num_samples if problem.source in BENCHMARKS else 16
        size = args.num_samples or (own if args.temperature else 1)  # Greedy ones are all alike.
        asked |= {(key, n): problem for n in range(size)}
    return asked


def open_folder(args: Args, folder: Path, problems: Problems) -> Missing:
    """Lock the folder, and delete old verdicts; returns (problem, number) of each missing answer.

    Raises InputError if the folder's answers are another model's, or were sampled otherwise.
    """
    check_numbers(args, "temperature", "top_k", "seed")
    cpu.warn_of_slow_bf16(args.precision)
    claim(folder)
    before, answers = read_args(folder), read_answers(folder.glob(ANSWERS))
    if before and "setting" not in before:  # A training run, or an earlier version's.
        raise InputError(f"{folder} holds something else: choose another folder")
    run = Path(args.model).resolve().parent
    if read_args(run).get("prompt", models.PROMPT) != models.PROMPT:
        print(f"note: {run} was trained with another prompt than models.py has", file=sys.stderr)
    # All that an answer depends on, besides the problem; without answers any of it may change.
    setting = {name: getattr(args, name) for name in PROTOCOL}
    setting |= {"model_version": model_version(args.model), "prompt": models.PROMPT}
    then = before["setting"] if answers else setting
    if other := [name for name in setting if then[name] != setting[name]]:
        raise InputError(f"{folder} has another {', '.join(other)}: choose another folder")
    for verdicts in ("samples.jsonl", "results.json"):
        (folder / verdicts).unlink(missing_ok=True)
    write_args(folder, **{**before, "args": asdict(args), "setting": setting})
    asked = answers_of(args, problems).items()
    missing = [(problem, n) for (key, n), problem in asked if (key, n) not in answers]
    return sorted(missing, key=lambda pair: pair[1])


# ---- Sample --------------------------------------------------------------------------------------


def sample(args: Args, folder: Path, tokenizer: Tokenizer, missing: Missing) -> None:
    """Sample this rank's share of the answers, and append each to its file as it ends."""
    texts = [models.prompt_text(tokenizer, p.question, ask(p)) for p, _ in missing]
    prompts = tokenizer(texts, add_special_tokens=False).input_ids
    seeds = [data.derive_seed(args.seed, p.source, p.id, n) for p, n in missing]
    longest = max(map(len, prompts)) + args.max_completion_length
    if dist.get_rank() == 0:
        models.refuse_special_tokens(tokenizer, ((p.where, p.question) for p, _ in missing))
        rows = zip((p.where for p, _ in missing), prompts, strict=True)
        models.check_model(tokenizer, args.model, longest, rows)
        # As in training, transformers loads it before vLLM starts.
        model = models.load_model(args.model, longest, args.precision)
    dist.barrier()
    path = folder / f"answers.rank{dist.get_rank()}.jsonl"
    with path.open("ab") as out:
        out.truncate(path.read_bytes().rfind(b"\n") + 1)  # A kill may leave half a row.
    sizes = {"max_length": longest, "rollout_batch_size": len(missing), "num_rollouts": 1}
    options = RolloutArgs(**sizes, precision=args.precision, vllm_memory=args.vllm_memory)
    rollout = Rollout(args.model, tokenizer, options, load_from_disk=True)
    if dist.get_rank() == 0:
        refuse_gap(rollout, model, min(prompts, key=len))
        del model
        write_args(folder, **{**read_args(folder), "vllm_runner": rollout.model_runner})

    def keep(completions: list[Completion]) -> None:
        with blame(str(path), (OSError,)), path.open("ab") as out:  # The disk may be full.
            for completion in completions:
                problem, n = missing[completion.query]
                row = {"problem": key_of(problem), "benchmark": problem.source, "id": problem.id}
                row |= {"sample": n, "finish_reason": completion.finish_reason}
                row |= {"tokens": len(completion.token_ids), "text": completion.text}
                out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    rollout.generate(prompts, 1, args.max_completion_length, seeds, on_end=keep, **args.sampling)


def refuse_gap(rollout: Rollout, model: torch.nn.Module, prompt: Sequence[int]) -> None:
    """Raise InputError, as training does, if vLLM samples from another model than this."""
    gaps = []
    for answer in rollout.generate([prompt], 4, 32, [0], temperature=1.0, with_logprobs=1):
        own = own_logprobs(model, torch.tensor([[*prompt, *answer.token_ids]]))
        gaps += (own[len(prompt) - 1 :] - torch.tensor(answer.logprobs)).abs().tolist()
    if not (gap := np.mean(gaps)) < MAX_VLLM_GAP[rollout.args.precision]:
        raise InputError(f"{rollout.model}: vLLM is {gap:.2g} nats a token off transformers")


# ---- Grade and report ----------------------------------------------------------------------------


def grade(args: Args, folder: Path, problems: Problems) -> list[dict]:
    """Grade all answers to these problems; returns them in their order. A collective."""
    asked = answers_of(args, problems)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # This rank's share of the files, among them the one that it has written.
    files = [p for p in folder.glob(ANSWERS) if int(p.stem.split("rank")[1]) % ranks == rank]
    rows = [row for place, row in read_answers(files).items() if place in asked]
    answered = [asked[row["problem"], row["sample"]] for row in rows]
    references = [problem.columns if args.reward else problem.answer for problem in answered]
    texts, grades = [row["text"] for row in rows], []
    with verify.Verifier(args.verifier_workers, reward=args.reward) as verifier:
        for start in tqdm(range(0, len(rows), CHUNK), desc="grading", disable=rank > 0):
            chunk = slice(start, start + CHUNK)
            grades += verifier.grade(texts[chunk], references[chunk])
    for row, problem, verdict in zip(rows, answered, grades, strict=True):
        row |= {"correct": verdict.correct == 1, "ungraded": verdict.ungraded}
        row |= {"extracted": verdict.extracted, "answer": problem.answer}  # the reference
        row |= {"reward": verdict.correct} if args.reward else {}
    graded = {(row["problem"], row["sample"]): row for row in gather(rows)}
    return [graded[place] for place in asked]  # one that two ranks have counts once


def right_counts(rows: Sequence[dict]) -> tuple[np.ndarray, int]:
    """Of a benchmark: right answers to each problem (N,), in their order, and answers to each."""
    counts = Counter()
    for row in rows:
        counts[row["id"]] += row["correct"]
    return np.array(list(counts.values())), len(rows) // len(counts)


def summarize(rows: Sequence[dict]) -> dict:
    """One benchmark's results: shares and scores are in [0, 1], lengths in tokens."""
    counts, num_samples = right_counts(rows)
    results = {"problems": len(counts), "samples": num_samples}
    for k in range(1, num_samples + 1):
        score, bounds = score_with_interval(counts, num_samples, k)
        results |= {f"pass@{k}": score, f"pass@{k}_interval": bounds}
    truncated = [row for row in rows if row["finish_reason"] == "length"]
    extracted = [verify.extract(row["text"], row["answer"]) for row in rows]
    return {
        **results,
        "truncated_share": len(truncated) / len(rows),
        "truncated_right_share": sum(row["correct"] for row in truncated) / len(rows),
        "without_box_share": sum(read is None for read in extracted) / len(rows),
        "ungraded_share": sum(row["ungraded"] for row in rows) / len(rows),
        "completion_length_mean": sum(row["tokens"] for row in rows) / len(rows),
    }


def report(args: Args, folder: Path, rows: Sequence[dict]) -> None:
    """Write samples.jsonl and results.json, and print a table."""
    code = provenance()
    graded_by = {"git_commit": code["git_commit"], "math-verify": code["versions"]["math-verify"]}
    graded_by |= {"reward": args.reward and str(Path(args.reward).resolve())}
    benchmarks = {}
    for row in rows:
        benchmarks.setdefault(row["benchmark"], []).append(row)
    results = {name: summarize(own) | {"graded_by": graded_by} for name, own in benchmarks.items()}
    data.write_rows(rows, folder / "samples.jsonl")
    data.write_json(results, folder / "results.json")
    warn_of_answers({"ungraded_share": max(r["ungraded_share"] for r in results.values())})

    print(f"\n{'':16}problems answers truncated (right) no box tokens  pass@k in % [95 % interval]")
    for name, r in results.items():
        ks = sorted({1, r["samples"]})
        scores = [f"@{k} {percent(r[f'pass@{k}'], r[f'pass@{k}_interval'])}" for k in ks]
        print(
            f"{name:16}{r['problems']:8}{r['samples']:8}{r['truncated_share']:10.1%}"
            f"{r['truncated_right_share']:8.1%}{r['without_box_share']:7.1%}"
            f"{r['completion_length_mean']:7.0f}  {'  '.join(scores)}"
        )
    print(f"\nwritten: {folder}")


def percent(score: float, bounds: Interval, sign: str = "") -> str:
    """Shares as text: 0.5, (0.4, 0.6) -> "50.0 [40.0, 60.0]"."""
    shown = [f"{100 * value:{sign}.1f}" for value in (score, *bounds)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


if __name__ == "__main__":
    run_script(evaluate, Args, __doc__)
