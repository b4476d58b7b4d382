"""Start, verifier, log-probabilities, sampling beside alternatives: python -m bench.parts"""

import itertools
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from math_verify import parse, verify

import train_oswft
from bench.measure import compare, extra_memory, print_section, timed
from bench.setup import DATA, MAX_LENGTH, MAX_TOKENS, MODEL, QUERIES, load_rows
from data import load_tokenizer
from engine import init_ranks, share_cores
from logprobs import LogprobHead
from rollout import Rollout
from verify import Verifier

# example_model_solutions.jsonl of github.com/openai/grade-school-math
SOLUTIONS = Path("../shared/data/gsm8k_model_solutions.jsonl")
HOSTILE = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10^{10^{10}}}", r"\boxed{1000000!}"]
HOSTILE += [r"\boxed{" + 2000 * "(" + "1" + 2000 * ")" + "}", r"\boxed{(x+y+z+w)^{500}}"]
HOSTILE += [r"\boxed{\prod_{i=1}^{10^{9}} i}", r"\boxed{\sin(\sin(10^{10^{10}}))}"]
HOSTILE += [r"\boxed{" + 800 * r"\sqrt{" + "2" + 800 * "}" + "}"]
HOSTILE += [r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}"]
HOSTILE += [r"\boxed{\sum_{n=1}^\infty \frac{\log(n)^7}{n^\pi+\sqrt{n}}}"]  # until the deadline
IMPORTS = "from transformers import AutoModelForCausalLM; from vllm import LLM; import os; "
IMPORTS += "os._exit(0)"  # Python's own end would take seconds


def start(repetitions: int) -> list[str]:
    def python(*command) -> Callable:
        command = [sys.executable, *map(str, command)]
        return partial(timed, partial(subprocess.run, command, stdout=2, check=True))

    with tempfile.TemporaryDirectory() as folder:
        python("-m", "demo.tiny", "copy", "--output_dir", f"{folder}/base")()
        command = ["train_oswft.py", "--model", "demo/base", "--data", f"{folder}/base/train.jsonl"]
        command += ["--precision", "fp32", "--max_length", 128, "--max_completion_length", 48]
        command += ["--max_steps", 1, "--output_dir"]
        runs = itertools.count()
        calls = {
            "`train_oswft.py`, a whole run of one step": lambda: python(
                *command, f"{folder}/run-{next(runs)}"
            )(),
            "the imports alone": python("-c", IMPORTS),
        }
        return compare("start, s", calls, repetitions, {"the imports alone": "≥ 0.7"})


def verifier(repetitions: int, solutions: Path, limit: int) -> list[str]:
    logging.disable(logging.CRITICAL)
    pairs = []
    for row in map(json.loads, solutions.open()):
        answer = row["ground_truth"].rpartition("A: ")[2]
        pairs += [(row[key]["solution"], answer) for key in row if "is_correct" in row[key]]
    completions, answers = map(list, zip(*pairs[:limit], strict=True))
    mixed = [*completions]
    mixed[::100] = itertools.islice(itertools.cycle(HOSTILE), len(mixed[::100]))  # 1 %

    def plain() -> list:
        pairs = zip(answers, completions, strict=True)
        return [verify(parse(answer), parse(completion)) for answer, completion in pairs]

    with Verifier(num_workers=2) as workers:
        calls = {
            "`Verifier`, 2 workers": lambda: timed(lambda: workers.score(completions, answers)),
            "Math-Verify in a plain loop": lambda: timed(plain),
            "`Verifier`, 1 % hostile": lambda: timed(lambda: workers.score(mixed, answers)),
        }
        title = f"verifier, {len(answers):,} solutions of GSM8K, s"
        return compare(title, calls, repetitions, {"Math-Verify in a plain loop": "≥ 1.5"})


def logprobs(
    repetitions: int, tokens: int, vocabulary: int, precision: str, device: str = "cpu"
) -> list[str]:
    """Forward and backward, seconds and bytes beyond the inputs and their gradients."""
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

    def each(measure: Callable) -> dict[str, Callable]:
        return {call.__name__: partial(measure, call) for call in (ours, dense)}

    title = f"log-probabilities, {precision}, {tokens:,} × {vocabulary:,}"
    memory = each(lambda call: extra_memory(call, device) / 2**20)
    lines = compare(f"{title}, s", each(timed), repetitions, {"dense": "≥ 0.8"})
    return lines + compare(f"{title}, extra MiB", memory, 1, {"dense": "≥ 7"})


def rollouts(repetitions: int, model: Path, data: Path) -> list[str]:
    prompts = [row.prompt_ids for row in load_rows(model, data)[:QUERIES]]
    seeds, found = list(range(QUERIES)), []
    init_ranks("gloo")
    args = train_oswft.Args(model=str(model), data="", vllm_memory=0.2)
    rollout = Rollout(args, load_tokenizer(str(model)), MAX_LENGTH, load_weights_from_disk=True)
    options = {"n": 2, "max_tokens": MAX_TOKENS, "stop_token_ids": rollout.stop_token_ids}

    def bare() -> None:
        params = [rollout.vllm.SamplingParams(seed=n, detokenize=False, **options) for n in seeds]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = rollout.llm.generate(inputs, params, use_tqdm=False)
        found.extend(sample for output in outputs for sample in output.outputs)

    def ours() -> None:
        found.extend(rollout.generate(prompts, 2, MAX_TOKENS, seeds, logprobs=4))

    def per_token(call: Callable) -> float:
        rollout.llm.reset_prefix_cache()
        found.clear()
        return 1000 * timed(call) / sum(len(answer.token_ids) for answer in found)

    calls = {"`rollout.py`": partial(per_token, ours), "`LLM.generate`": partial(per_token, bare)}
    title = f"sampling, {QUERIES} word problems, 2 answers each, bf16, ms a token"
    return compare(title, calls, repetitions, {"`LLM.generate`": "≥ 0.97"})


def main(
    model: Path = MODEL,
    data: Path = DATA,
    solutions: Path = SOLUTIONS,
    tokens: int = 4096,
    vocabulary: int = 151_936,
    limit: int = 2048,
    repetitions: int = 5,
) -> list[str]:
    """Measure; returns Markdown. `limit` is of the solutions that the verifier checks."""
    share_cores()
    lines = start(repetitions) + verifier(repetitions, solutions, limit)
    # With AVX2 alone torch takes hours for products of this size in bf16.
    slow = torch.backends.cpu.get_cpu_capability() == "AVX2"
    for precision in ["fp32"] + ["bf16"] * (not slow):
        lines += logprobs(min(3, repetitions), tokens, vocabulary, precision)
    return lines + rollouts(repetitions, model, data)


if __name__ == "__main__":
    print_section(main, __doc__)
