"""How good is a model? pass@1 and pass@k on a file of problems, by source.

    python evaluate.py --model runs/oswft/final --data heldout.jsonl --num_samples 8 --k 1 8

Every problem is answered `num_samples` times; pass@k is the unbiased estimate of the chance that at
least one of k answers is right. The answers are kept in samples.jsonl, the scores in results.json.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from data import (
    InputError,
    derive_seed,
    load_examples,
    load_tokenizer,
    tokenize_examples,
    write_rows,
)
from rollout import Rollout
from verify import Verifier


@dataclass
class Args:
    model: str  # hub id or folder
    data: str  # hub id or JSONL file with id, question, solution, answer, source
    output_dir: str = "runs/eval"  # samples.jsonl and results.json
    num_samples: int = 16  # answers to each problem
    k: tuple[int, ...] = (1, 16)  # of pass@k
    temperature: float = 0.6  # of sampling
    top_p: float = 0.95  # of sampling
    top_k: int = 20  # of sampling; 0 for all tokens
    max_completion_length: int = 8192  # tokens of an answer
    max_length: int = 9216  # tokens of prompt and answer
    precision: str = "bf16"  # or fp32
    vllm_memory: float = 0.8  # share of the GPU's (on CPU: the host's) memory for vLLM
    verifier_workers: int = 2  # processes that check answers
    seed: int = 0  # of sampling


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


def evaluate(args: Args) -> None:
    if max(args.k) > args.num_samples:
        raise InputError(f"{args.num_samples} samples allow pass@k up to k={args.num_samples}")
    tokenizer = load_tokenizer(args.model)
    problems, dropped = tokenize_examples(
        load_examples(args.data), tokenizer, args.max_length, args.max_completion_length
    )
    if any(dropped.values()):
        raise InputError(f"{args.data}: problems that do not fit the length limits: {dropped}")
    rollout = Rollout(
        args.model,
        tokenizer,
        max_length=args.max_length,
        precision=args.precision,
        memory_share=args.vllm_memory,
        load_weights_from_disk=True,
    )
    with (
        tqdm(total=len(problems), desc="answering", unit="problem") as bar,
        Verifier(args.verifier_workers) as verifier,
    ):
        samples = rollout.generate(
            [problem.prompt_ids for problem in problems],
            num_samples=args.num_samples,
            max_tokens=args.max_completion_length,
            seeds=[derive_seed(args.seed, problem.example.id) for problem in problems],
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            on_progress=lambda finished, total: bar.update(finished - bar.n) or True,
        )
        verdicts = verifier.score(
            [sample.text for sample in samples],
            [problems[sample.query].example.answer for sample in samples],
        )
    write_rows(
        [
            {"id": problems[sample.query].example.id, "correct": right, **vars(sample)}
            for sample, right in zip(samples, verdicts, strict=True)
        ],
        Path(args.output_dir) / "samples.jsonl",
    )
    scores: dict[str, list[int]] = {}  # source -> right answers to each of its problems
    for i, problem in enumerate(problems):
        right = sum(verdicts[i * args.num_samples : (i + 1) * args.num_samples])
        scores.setdefault(problem.example.source, []).append(right)
    results = {
        source: {
            "problems": len(counts),
            **{
                f"pass@{k}": sum(pass_at_k(args.num_samples, right, k) for right in counts)
                / len(counts)
                for k in args.k
            },
        }
        for source, counts in sorted(scores.items())
    }
    Path(args.output_dir, "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for source, result in results.items():
        print(f"{source:12}", *(f"{name} {value:.3g}" for name, value in result.items()), sep="  ")


if __name__ == "__main__":
    try:
        evaluate(tyro.cli(Args, description=__doc__, use_underscores=True))
    except InputError as error:
        sys.exit(f"error: {error}")
