"""Start, verifier, log-probabilities, sampling beside alternatives: python -m bench.parts"""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.measure import compare, extra_memory, print_section, timed
from cpu import bf16_is_slow, share_cores
from data import Query, load_examples
from demo.tiny import copy
from logprobs import LogprobHead
from models import load_tokenizer, tokenize_examples
from ranks import init_ranks
from rollout import Rollout, RolloutArgs
from verify import Verifier

import torch
from math_verify import parse, verify

MODEL, DATA = Path("runs/real/sft/final"), Path("data/svamp-train.jsonl")  # of docs/demo.md
MAX_LENGTH, MAX_TOKENS = 512, 96  # of a row, and of an answer
QUERIES = 32  # of an optimizer step
SOLUTIONS = Path("data/example_model_solutions.jsonl")  # of github.com/openai/grade-school-math
IMPORTS = "from transformers import AutoModelForCausalLM; from vllm import LLM; import os; "
IMPORTS += "os._exit(0)"  # Python's own end would take seconds


def load_rows(model: Path, data: Path, max_length: int = MAX_LENGTH) -> list[Query]:
    tokenizer = load_tokenizer(str(model))
    return tokenize_examples(load_examples(str(data)), tokenizer, max_length, MAX_TOKENS)[0]


def start(repetitions: int) -> list[str]:
    def python(*command) -> float:
        command = [sys.executable, *map(str, command)]
        return timed(lambda: subprocess.run(command, stdout=2, check=True))

    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder, "base"))
        command = ["train_oswft.py", "--model", "demo/base", "--data", f"{folder}/base/train.jsonl"]
        command += ["--precision", "fp32", "--max_length", 128, "--max_completion_length", 48]
        command += ["--max_steps", 1, "--output_dir"]
        cases = {
            "a run of one step": lambda turn: python(*command, f"{folder}/run-{turn}"),
            "the imports alone": lambda turn: python("-c", IMPORTS),
        }
        return [compare("start, s", cases, repetitions, {"the imports alone": 0.7})]


def verifier(repetitions: int, solutions: Path) -> list[str]:
    logging.disable(logging.CRITICAL)
    pairs = []
    for row in map(json.loads, solutions.open()):
        answer = row["ground_truth"].rpartition("A: ")[2]
        pairs += [(row[key]["solution"], answer) for key in row if "is_correct" in row[key]]
    completions, answers = map(list, zip(*pairs[:2048], strict=True))

    def plain() -> None:
        for answer, completion in zip(answers, completions, strict=True):
            verify(parse(answer), parse(completion))

    def ours(_) -> float:
        with Verifier(num_workers=2) as verifier:  # a new one: the last one remembers what it read
            for worker in verifier.workers:
                worker.wait_until_ready()
            return timed(lambda: verifier.score(completions, answers))

    cases = {"`Verifier`, 2 workers": ours, "Math-Verify in a plain loop": partial(timed, plain)}
    title = f"verifier, {len(answers):,} solutions of GSM8K, s"
    return [compare(title, cases, repetitions, {"Math-Verify in a plain loop": 1.5})]


def logprobs(
    repetitions: int, tokens: int, vocabulary: int, precision: str, device: str = "cpu"
) -> list[str]:
    """Forward and backward: seconds, and MiB beyond the inputs and their gradients."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16 if precision == "bf16" else torch.float32, "device": device}
    hidden = torch.randn(tokens, 1024, **options, requires_grad=True)
    linear = torch.nn.Linear(1024, vocabulary, bias=False, **options)
    head, weight = LogprobHead(linear), linear.weight
    targets = torch.randint(vocabulary, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    def ours() -> tuple:
        return torch.autograd.grad(head(hidden, targets), [hidden, weight], upstream)

    def dense() -> tuple:
        logits = (hidden @ weight.T).float()
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        del logits
        return torch.autograd.grad(logprobs, [hidden, weight], upstream)

    def extra_mib(call: Callable, turn: int) -> float:
        return extra_memory(call, device) / 2**20

    title, pages = f"log-probabilities, {precision}, {tokens:,} × {vocabulary:,}", []
    for unit, measure, turns, goal in ("s", timed, repetitions, 0.75), ("MiB", extra_mib, 1, 7):
        cases = {call.__name__: partial(measure, call) for call in (ours, dense)}
        pages.append(compare(f"{title}, {unit}", cases, turns, {"dense": goal}))
    return pages


def rollouts(repetitions: int, model: Path, data: Path) -> list[str]:
    prompts = [row.prompt_ids for row in load_rows(model, data)[:QUERIES]]
    seeds, found = list(range(QUERIES)), []
    init_ranks("gloo")
    model = str(model)
    sampling = RolloutArgs(max_length=MAX_LENGTH, vllm_memory=0.2)
    rollout = Rollout(model, load_tokenizer(model), sampling, load_from_disk=True)
    options = {"n": 2, "max_tokens": MAX_TOKENS, "stop_token_ids": rollout.stop_token_ids}

    def bare() -> None:
        params = [rollout.vllm.SamplingParams(seed=n, detokenize=False, **options) for n in seeds]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = rollout.llm.generate(inputs, params, use_tqdm=False)
        found.extend(sample for output in outputs for sample in output.outputs)

    def ours() -> None:
        found.extend(rollout.generate(prompts, 2, MAX_TOKENS, seeds, with_logprobs=4))

    def per_token(call: Callable, turn: int) -> float:
        rollout.llm.reset_prefix_cache()
        found.clear()
        return 1000 * timed(call) / sum(len(answer.token_ids) for answer in found)

    cases = {"`rollout.py`": partial(per_token, ours), "`LLM.generate`": partial(per_token, bare)}
    title = f"sampling, {QUERIES} word problems, 2 answers each, bf16, ms a token"
    return [compare(title, cases, repetitions, {"`LLM.generate`": 0.97})]


def main(
    model: Path = MODEL,
    data: Path = DATA,
    solutions: Path = SOLUTIONS,
    tokens: int = 4096,
    vocabulary: int = 151_936,
    repetitions: int = 5,
) -> list[str]:
    """Measure; returns Markdown."""
    share_cores()
    lines = ["## parts", *start(repetitions), *verifier(repetitions, solutions)]
    for precision in ["fp32"] + ["bf16"] * (not bf16_is_slow()):  # it would take hours
        lines += logprobs(min(3, repetitions), tokens, vocabulary, precision)
    return lines + rollouts(repetitions, model, data)


if __name__ == "__main__":
    print_section(main, __doc__)
