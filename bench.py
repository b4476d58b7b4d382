"""What each part costs, measured on this machine beside what one would use instead.

    make bench                 # everything that this machine can run, into BENCHMARKS.md
    python bench.py logprobs   # one section: sft, logprobs, rollout, sync, verify, step, scaling,
                               # curate, gpu
    python bench.py plan --model Qwen/Qwen3-4B-Base --gpus 8 --gpu_memory 80   # does a run fit?

What is compared takes turns, and a figure is the median over the turns. Quote ratios: they hold on
other machines, seconds do not.
"""

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import tyro
from tqdm import tqdm

HERE = Path(__file__).parent
BASE = Path("runs/bench/base")  # the tiny model of the demo, made when it is first needed
RELEASE = 14.6e9  # bytes of AM-Qwen3-Distilled's math.jsonl
SENTENCES = (  # of made-up reasoning; {} is a number
    "Okay, let's see what the problem asks. We start from {} and {}.",
    "So $x^2 + {}x - {} = 0$, and the discriminant is ${} + {}$.",
    "Wait, I should check that again: {} times {} is {}, not {}.",
    "The triangle has sides $\\frac{{{}}}{{{}}}$ and $\\sqrt{{{}}}$, so its area follows.",
    "Therefore the remaining part is {}% of the total, which gives {}.",
    "Alternatively, suppose that the train travels at {} km per hour for {} hours.",
    "Hmm, but then the sum of the digits would be {}, and that cannot be divisible by {}.",
    "Let me plug in $n = {}$: the left side becomes ${} \\cdot {}$, as it should.\n\n",
)


# ------------------------------------------------------------------------------------------------
# Measuring and reporting


def take_turns(cases: dict[str, Callable], repetitions: int, warm_up: int = 1) -> dict[str, list]:
    """Call every case once a turn, every other turn in reverse; the answers, without the first."""
    measured: dict[str, list] = {name: [] for name in cases}
    for turn in tqdm(range(warm_up + repetitions), desc="turns"):
        for name in list(cases)[:: -1 if turn % 2 else 1]:
            value = cases[name]()
            if turn >= warm_up:
                measured[name].append(value)
    return measured


def ratio(above: list[float], below: list[float]) -> float:
    """The median over the turns of one figure ÷ another: both had the same minute's machine."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def timed(call: Callable) -> float:
    """Seconds that a call takes, and the GPU with it."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def extra_memory(call: Callable) -> tuple[float, int]:
    """Seconds, and bytes held at the peak beyond those before and those of the tensors returned."""
    import torch

    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not look like free memory
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = psutil.Process().memory_info().rss
    kept = []
    seconds = timed(lambda: kept.extend(call()))
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    else:
        status = Path("/proc/self/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024
    return seconds, peak - before - sum(tensor.nbytes for tensor in kept)


class Worker:
    """A process that measures when it is called: for what cannot share a process.

    Args:
        prepare: called in the new process; returns the function that measures.
    """

    def __init__(self, prepare: Callable[..., Callable], *args):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, prepare, args)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self):
        self.pipe.send(None)
        return self.pipe.recv()


def _serve(pipe, prepare: Callable[..., Callable], args: tuple) -> None:
    measure = prepare(*args)
    with contextlib.suppress(EOFError):  # the process that asks has come to its end
        while True:
            pipe.recv()
            pipe.send(measure())


def table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; its first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def goal(what: str, value: float, bound: str) -> str:
    """A line that says whether a figure is where it should be; `bound` is "≥ 1.3" or "≤ 3"."""
    sign, limit = bound.split()
    reached = value >= float(limit) if sign == "≥" else value <= float(limit)
    return f"- {what}: **{value:.2f}** (goal {bound}: {'reached' if reached else 'NOT reached'})"


def machine() -> str:
    """The machine and the versions, in a sentence."""
    import torch

    from data import provenance

    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    what = f"{len(os.sched_getaffinity(0))} cores of {model[1] if model else 'a CPU'}"
    what += f", {psutil.virtual_memory().total / 2**30:.0f} GiB"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    commit = (found["git_commit"] or "unknown")[:10]
    return f"{what}; {', '.join(gpus) or 'no GPU'}; {versions}; commit {commit}"


def section(function: Callable[..., list[str]]) -> Callable[..., None]:
    """Print the Markdown paragraphs that a function returns, and nothing else, on stdout."""

    @functools.wraps(function)
    def run(*args, **kwargs) -> None:
        with os.fdopen(os.dup(1), "w") as output:
            os.dup2(2, 1)  # what libraries print, and processes that we start
            with contextlib.redirect_stdout(sys.stderr):
                paragraphs = function(*args, **kwargs)
            print("\n\n".join(paragraphs), file=output)

    return run


# ------------------------------------------------------------------------------------------------
# What is measured on


def tiny_base(base: Path) -> Path:
    """The folder of the demo's tiny model and its data."""
    if not (base / "heldout").is_dir():
        command = [sys.executable, "tiny.py", "make", "--output_dir", base.absolute()]
        subprocess.run(list(map(str, command)), cwd=HERE, check=True)
    return base


def tiny_examples(base: Path) -> tuple[object, list]:
    """The tiny model's tokenizer and its training examples, tokenized."""
    from data import load_examples, load_tokenizer, tokenize_examples

    tokenizer = load_tokenizer(str(tiny_base(base) / "model"))
    examples = load_examples(str(base / "train.jsonl"))
    return tokenizer, tokenize_examples(examples, tokenizer, 128, 48)[0]


def be_alone() -> None:
    """Be rank 0 of 1, if no launcher has said otherwise."""
    from engine import init_distributed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    init_distributed()


def random_rows(lengths: list[tuple[int, int]], vocabulary: range, seed: int = 0) -> list:
    """Rows of random tokens with the given lengths of prompt and completion."""
    from data import Example, TokenizedExample

    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(vocabulary.start, vocabulary.stop, count).tolist()

    return [
        TokenizedExample(Example(f"{n}", "-", "-", "7", "bench"), ids(prompt), ids(completion))
        for n, (prompt, completion) in enumerate(lengths)
    ]


class Setup(NamedTuple):
    """What a training script holds in its loop."""

    engine: object
    rollout: object
    verifier: object


def prepare_training(model: Path, max_length: int, num_workers: int = 2) -> Setup:
    """Engine, vLLM and verifier, as a training script makes them. The model hardly moves."""
    from data import load_tokenizer
    from engine import Engine, load_model
    from rollout import Rollout
    from verify import Verifier

    be_alone()
    engine = Engine(load_model(str(model), max_length), 1e-12, 1.0, precision="fp32")
    rollout = Rollout(str(model), load_tokenizer(str(model)), max_length, precision="fp32")
    return Setup(engine, rollout, Verifier(num_workers).__enter__())


def step_of(
    method: str, setup: Setup, queries: list, num_rollouts: int, max_tokens: int, weights=None
) -> dict[str, float]:
    """Seconds by phase of one step of a method, made of the training script's own pieces.

    Args:
        weights: (B,) in place of OSW-FT's own.
    """
    import train_grpo
    import train_oswft
    import train_sft
    from engine import Stopwatch, check_answers

    engine, rollout, verifier = setup
    common = {"model": "", "data": "", "num_rollouts": num_rollouts}
    clock = Stopwatch()
    if method == "sft":
        train_sft.update(engine, queries, train_sft.Args(model="", data=""))
        clock.lap("train")
        return clock.read()
    rollout.load_weights(engine.named_weights())
    clock.lap("sync")
    completions = rollout.generate(
        [query.prompt_ids for query in queries],
        num_samples=num_rollouts,
        max_tokens=max_tokens,
        seeds=list(range(len(queries))),
        logprobs=method == "grpo",
    )
    clock.lap("rollout")
    answers, rewards = check_answers(verifier, completions, queries)
    clock.lap("verify")
    if method == "oswft":
        weights = train_oswft.oswft_weights(rewards) if weights is None else weights
        train_oswft.update(engine, queries, weights, train_oswft.Args(**common))
    else:
        advantages = train_grpo.grpo_advantages(rewards).flatten()
        samples = [
            train_grpo.Sample.of(queries[answer.query], answer, advantage)
            for (answer, _), advantage in zip(answers, advantages, strict=True)
        ]
        train_grpo.update(engine, samples, train_grpo.Args(**common))
    clock.lap("train")
    return clock.read()


# ------------------------------------------------------------------------------------------------
# Training


MIXED_LENGTHS = "prompts of 16 to 48 tokens, solutions log-normal about 80, at most 440"


def mixed_lengths(count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(16, 49, count)
    solutions = np.minimum(rng.lognormal(np.log(80), 0.8, count).astype(int) + 1, 440)
    return list(zip(prompts.tolist(), solutions.tolist(), strict=True))


def prepare_ours(model: str, batches: int) -> Callable[[], float]:
    """Measures tokens/s of `train_sft.py`'s optimizer step on 128 rows."""
    import train_sft
    from engine import Engine

    be_alone()
    args = train_sft.Args(model=model, data="", max_length=512, precision="fp32")
    rows = random_rows(mixed_lengths(128 * batches), range(8, 27))
    engine = Engine.from_args(args)

    def measure() -> float:
        seconds = [
            timed(lambda n=n: train_sft.update(engine, rows[128 * n : 128 * n + 128], args))
            for n in range(batches)
        ]
        return sum(map(len, rows)) / sum(seconds)

    return measure


def prepare_trl(model: str, batches: int, micro_batch: int, sampling: str) -> Callable[[], float]:
    """Measures tokens/s of TRL's SFTTrainer on the same rows, 128 to an optimizer step."""
    import datasets
    import transformers
    import trl

    rows = random_rows(mixed_lengths(128 * batches), range(8, 27))
    data = datasets.Dataset.from_list(
        [
            {
                "input_ids": row.prompt_ids + row.completion_ids,
                "labels": [-100] * len(row.prompt_ids) + row.completion_ids,
            }
            for row in rows
        ]
    )
    began: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            began.append(time.perf_counter())

        def on_train_end(self, *_, **__):
            began.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
            train_dataset=data,
            callbacks=[Clock()],
            args=trl.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=128 // micro_batch,
                train_sampling_strategy=sampling,
                max_steps=batches,
                max_length=512,
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                bf16=False,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )

    def measure() -> float:
        began.clear()
        trainer.train()
        return sum(map(len, rows)) / (began[-1] - began[0])

    return measure


@section
def sft(base: Path = BASE, repetitions: int = 5, batches: int = 6) -> list[str]:
    """The optimizer step of train_sft.py, beside TRL's SFTTrainer.

    Args:
        base: folder of the tiny model; made if it is not there.
        repetitions: turns.
        batches: optimizer steps in a turn.
    """
    model = str(tiny_base(base) / "model")
    cases = {
        "`train_sft.py`, one rank": Worker(prepare_ours, model, batches),
        "TRL, 128 rows at once": Worker(prepare_trl, model, batches, 128, "random"),
        "TRL, 32 rows at once": Worker(prepare_trl, model, batches, 32, "random"),
        "TRL, 32 at once, grouped by length": Worker(
            prepare_trl, model, batches, 32, "group_by_length"
        ),
    }
    measured = take_turns(cases, repetitions)
    ours, *others = measured.values()
    rows = [
        [name, f"{statistics.median(rates):,.0f}", f"{ratio(ours, rates):.2f}"]
        for name, rates in measured.items()
    ]
    return [
        "Tiny model (0.4M parameters), fp32, 128 rows to an optimizer step, padding not counted; "
        f"{MIXED_LENGTHS}.",
        table(["", "tokens/s", "ours is faster by"], rows),
        goal("ours ÷ TRL's fastest", min(ratio(ours, rates) for rates in others), "≥ 1.3"),
    ]


# ------------------------------------------------------------------------------------------------
# Log-probabilities


def logprob_cases(tokens: int, vocabulary: int, hidden_size: int, dtype, device: str) -> dict:
    """Per-token log-probabilities, forward and backward: functions that return the gradients."""
    import torch

    from engine import TiledLogprobs

    torch.manual_seed(0)
    options = {"dtype": dtype, "device": device, "requires_grad": True}
    hidden = torch.randn(tokens, hidden_size, **options)
    weight = torch.empty(vocabulary, hidden_size, dtype=dtype, device=device).normal_(0, 0.02)
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    def ours():
        logprobs = TiledLogprobs.apply(hidden, weight, targets, 1.0)
        return torch.autograd.grad(logprobs, [hidden, weight], upstream)

    def dense():
        logits = (hidden @ weight.T).float()
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        del logits
        return torch.autograd.grad(logprobs, [hidden, weight], upstream)

    def liger():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)
        return torch.autograd.grad(loss, [hidden, weight])

    def product():
        for tile in range(0, vocabulary, 1024):
            hidden @ weight[tile : tile + 1024].T
        return []

    cases = {"ours": ours, "dense": dense, "one matrix product": torch.no_grad()(product)}
    return {**cases, "Liger": liger} if device == "cuda" else cases


def logprob_rows(cases: dict, repetitions: int, label: str) -> tuple[list[list], float, float]:
    """Rows of a table; ours ÷ dense in seconds, and in extra memory."""
    measured = take_turns({n: lambda c=c: extra_memory(c) for n, c in cases.items()}, repetitions)
    seconds = {name: [s for s, _ in values] for name, values in measured.items()}
    memory = {name: [m for _, m in values] for name, values in measured.items()}
    rows = [
        [
            f"{label}, {name}",
            f"{statistics.median(seconds[name]):.3g}",
            f"{ratio(seconds[name], seconds['dense']):.2f}",
            f"{statistics.median(memory[name]) / 2**20:,.0f}",
            f"{ratio(memory[name], memory['dense']):.3f}",
        ]
        for name in cases
    ]
    time_ratio = ratio(seconds["ours"], seconds["dense"])
    return rows, time_ratio, ratio(memory["ours"], memory["dense"])


LOGPROB_HEADER = ["", "s", "÷ dense", "extra peak memory, MiB", "÷ dense"]


@section
def logprobs(
    tokens: int = 4096, vocabulary: int = 151_936, hidden_size: int = 1024, repetitions: int = 5
) -> list[str]:
    """Per-token log-probabilities, forward and backward, beside a dense log_softmax and gather.

    Args:
        tokens: rows of the hidden states.
        vocabulary: rows of the head.
        hidden_size: width of both.
        repetitions: turns.
    """
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows, goals = [], []
    for label, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        cases = logprob_cases(tokens, vocabulary, hidden_size, dtype, "cpu")
        more, seconds, memory = logprob_rows(cases, repetitions, label)
        rows += more
        goals.append(goal(f"{label}, seconds ÷ dense", seconds, "≤ 1.1"))
        goals.append(goal(f"{label}, extra memory ÷ dense", memory, "≤ 0.1"))
    return [
        f"{tokens:,} tokens × {vocabulary:,} vocabulary, hidden size {hidden_size:,}; extra is "
        "what is held beyond the inputs and their gradients. The dense form takes three matrix "
        "products of this size, ours four, as it computes the logits again: where products are all "
        "that counts, 1.33 is the limit of this design.",
        table(LOGPROB_HEADER, rows),
        "\n".join(goals),
    ]


# ------------------------------------------------------------------------------------------------
# vLLM


@section
def rollout(base: Path = BASE, repetitions: int = 21) -> list[str]:
    """Tokens/s through rollout.py, beside the bare LLM.generate: 128 prompts × 2.

    Args:
        base: folder of the tiny model; made if it is not there.
        repetitions: turns.
    """
    from rollout import Rollout

    tokenizer, examples = tiny_examples(base)
    prompts = [example.prompt_ids for example in examples[:128]]
    ours = Rollout(str(base / "model"), tokenizer, 128, "fp32", load_weights_from_disk=True)

    def bare(seeded: bool, logprobs: int | None) -> int:
        params = [
            ours.vllm.SamplingParams(
                n=2,
                max_tokens=48,
                stop_token_ids=ours.stop_token_ids,
                seed=n if seeded else None,
                logprobs=logprobs,
                detokenize=False,
            )
            for n in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = ours.llm.generate(inputs, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    def through_rollout(logprobs: bool) -> int:
        seeds = list(range(len(prompts)))
        completions = ours.generate(prompts, 2, max_tokens=48, seeds=seeds, logprobs=logprobs)
        return sum(len(completion.token_ids) for completion in completions)

    def rate(sample: Callable[[], int]) -> float:
        tokens = []
        ours.llm.reset_prefix_cache()
        seconds = timed(lambda: tokens.extend(sample() for _ in range(3)))
        return sum(tokens) / seconds

    calls = {
        "`rollout.py`, as OSW-FT calls it": lambda: through_rollout(False),
        "`LLM.generate`, the same sampling parameters": lambda: bare(True, None),
        "`rollout.py`, as GRPO calls it (log-probabilities)": lambda: through_rollout(True),
        "`LLM.generate`, the same sampling parameters with log-probabilities": lambda: bare(
            True, 0
        ),
        "`LLM.generate`, no seeds, no log-probabilities": lambda: bare(False, None),
    }
    cases = {name: lambda call=call: rate(call) for name, call in calls.items()}
    measured = take_turns(cases, repetitions, warm_up=2)
    oswft, same, grpo, with_logprobs, _ = measured.values()
    rows = [
        [name, f"{statistics.median(rates):,.0f}", f"{ratio(rates, same):.2f}"]
        for name, rates in measured.items()
    ]
    return [
        "128 prompts × 2 of the demo, tiny model, fp32; `rollout.py` also decodes the text. A seed "
        "for each request makes a run repeatable for any number of ranks.",
        table(["", "tokens/s", "÷ `LLM.generate`"], rows),
        goal("OSW-FT's rollouts ÷ `LLM.generate`", ratio(oswft, same), "≥ 0.97")
        + "\n"
        + goal("GRPO's rollouts ÷ `LLM.generate`", ratio(grpo, with_logprobs), "≥ 0.97"),
    ]


@section
def sync(repetitions: int = 7) -> list[str]:
    """All weights of a 100M-parameter model into vLLM, beside a copy and a loop over parameters.

    Args:
        repetitions: turns.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import tiny
    from rollout import Rollout

    be_alone()
    from engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny.make_tokenizer()
        config = Qwen3Config(
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=2304,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=6,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(folder)
        engine = Engine(model, 1e-5, 1.0, precision="bf16")
        ours = Rollout(folder, tokenizer, 256, precision="bf16")
        named = dict(engine.named_weights())
        weights = list(named.values())
        room = [torch.empty_like(weight) for weight in weights]

        def one_by_one() -> None:
            """Each tensor of vLLM's in a call of its own: on CPU it takes no part of one."""
            parts: dict[str, list] = {}
            for name, weight in named.items():
                fused = re.sub("[qkv]_proj", "qkv", re.sub("(gate|up)_proj", "gate_up", name))
                parts.setdefault(fused, []).append((name, weight))
            for part in parts.values():
                ours.load_weights(iter(part))

        def copy() -> None:
            for source, target in zip(weights, room, strict=True):
                target.copy_(source)

        def sample() -> list[list[int]]:
            completions = ours.generate([[9, 10, 11]], 1, 8, seeds=[0], temperature=1e-4)
            return [completion.token_ids for completion in completions]

        ours.load_weights(engine.named_weights())
        expected = sample()
        one_by_one()
        assert sample() == expected, "the loop over parameters leaves another model"
        cases = {
            "`rollout.load_weights`": lambda: timed(
                lambda: ours.load_weights(engine.named_weights())
            ),
            "a copy of the same bytes": lambda: timed(copy),
            "a call for each tensor": lambda: timed(one_by_one),
        }
        measured = take_turns(cases, repetitions)
    ours_s, _, loop_s = measured.values()
    rows = [
        [name, f"{statistics.median(seconds):.3f}", f"{ratio(seconds, ours_s):.2f}"]
        for name, seconds in measured.items()
    ]
    size = sum(weight.nbytes for weight in weights) / 2**20
    count = sum(weight.numel() for weight in weights) / 1e6
    return [
        f"{count:.0f}M parameters in {len(weights)} tensors, bf16, {size:.0f} MiB, one rank. On "
        "CPU vLLM packs every matrix anew.",
        table(["", "s", "÷ ours"], rows),
        goal("a call for each tensor ÷ ours", ratio(loop_s, ours_s), "≥ 1.5"),
    ]


# ------------------------------------------------------------------------------------------------
# The verifier


HOSTILE = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{1000000!}",
    r"\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}",
    r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}",
    r"\boxed{(x+y+z+w)^{500}}",
    r"\boxed{\prod_{i=1}^{10^{9}} i}",
    r"\boxed{" + r"\sqrt{" * 800 + "2" + "}" * 800 + "}",
    r"\boxed{\sin(\sin(10^{10^{10}}))}",
    r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}",  # only the deadline ends this one
)


@section
def verify(
    solutions: Path = Path("../shared/data/gsm8k_model_solutions.jsonl"),
    num_workers: int = 2,
    repetitions: int = 5,
) -> list[str]:
    """Answers/s of the Verifier, beside Math-Verify in a plain loop; and with hostile answers.

    Args:
        solutions: example_model_solutions.jsonl of github.com/openai/grade-school-math.
        num_workers: of the verifier.
        repetitions: turns.
    """
    import logging

    import math_verify

    from verify import Verifier

    if not solutions.is_file():
        sys.exit(f"error: {solutions}: no such file; it is in github.com/openai/grade-school-math")
    logging.disable(logging.CRITICAL)
    pairs = []
    for line in solutions.open():
        row = json.loads(line)
        answer = row["ground_truth"].rpartition("A: ")[2]
        pairs += [(row[key]["solution"], answer) for key in row if "is_correct" in row[key]]
    pairs = pairs[:2048]
    mixed = list(pairs)
    for n in range(len(pairs) // 100):  # 1 %, evenly spread
        mixed[100 * n + 50] = (HOSTILE[n % len(HOSTILE)], mixed[100 * n + 50][1])

    def plain() -> list[bool]:
        return [
            math_verify.verify(math_verify.parse(answer), math_verify.parse(completion))
            for completion, answer in pairs
        ]

    with Verifier(num_workers) as verifier:
        verdicts = verifier.score(*zip(*pairs, strict=True))
        agree = sum(a == b for a, b in zip(verdicts, plain(), strict=True))
        cases = {
            "Math-Verify in a plain loop": lambda: timed(plain),
            f"`Verifier`, {num_workers} workers": lambda: timed(
                lambda: verifier.score(*zip(*pairs, strict=True))
            ),
            f"`Verifier`, {num_workers} workers, 1 % hostile": lambda: timed(
                lambda: verifier.score(*zip(*mixed, strict=True))
            ),
        }
        measured = take_turns(cases, repetitions)
    loop, clean, hostile = measured.values()
    rows = []
    for name, seconds in measured.items():
        median = statistics.median(seconds)
        rate = f"{len(pairs) / median:,.0f}"
        rows.append([name, f"{median:.2f}", rate, f"{ratio(loop, seconds):.2f}"])
    return [
        f"{len(pairs):,} solutions of GSM8K by language models; {agree:,} verdicts are the same. "
        f"{len(pairs) // 100} hostile answers, of {len(HOSTILE)} kinds.",
        table(["", "s", "answers/s", "faster than the loop by"], rows),
        goal("answers/s ÷ plain loop", ratio(loop, clean), "≥ 1.5")
        + "\n"
        + goal("seconds with 1 % hostile ÷ clean", ratio(hostile, clean), "≤ 3"),
    ]


# ------------------------------------------------------------------------------------------------
# Whole steps


PHASES = ("sync", "rollout", "verify", "train")


@section
def step(base: Path = BASE, repetitions: int = 7) -> list[str]:
    """A whole step of OSW-FT (K=2), SFT and GRPO (G=8) on the demo's model and data.

    Args:
        base: folder of the tiny model; made if it is not there.
        repetitions: turns; each has 128 queries of its own.
    """
    import torch

    _, examples = tiny_examples(base)
    setup = prepare_training(base / "model", 128)
    turns = dict.fromkeys(["sft", "oswft", "grpo", 0.0, 0.25, 0.5, 0.75, 1.0], 0)

    def measure(case: str | float) -> dict[str, float]:
        start = 128 * turns[case] % (len(examples) - 128)
        queries, turns[case] = examples[start : start + 128], turns[case] + 1
        if isinstance(case, str):
            return step_of(case, setup, queries, {"grpo": 8}.get(case, 2), 48)
        weights = torch.ones(128)
        weights[: int(128 * case)] = 0
        return step_of("oswft", setup, queries, 2, 48, weights[torch.randperm(128)])

    measured = take_turns({case: lambda case=case: measure(case) for case in turns}, repetitions)
    setup.verifier.__exit__()

    whole = {case: [sum(turn.values()) for turn in turns] for case, turns in measured.items()}

    def row(name: str, case: str | float, beside: str | float) -> list[str]:
        phases = [statistics.median(t.get(phase, 0) for t in measured[case]) for phase in PHASES]
        shares = [f"{phase:.3f} ({phase / sum(phases):.0%})" for phase in phases]
        median = f"{statistics.median(whole[case]):.3f}"
        return [name, *shares, median, f"{ratio(whole[case], whole[beside]):.2f}"]

    names = {"sft": "SFT", "oswft": "OSW-FT, K=2", "grpo": "GRPO, G=8"}
    header = ["s (share)", *PHASES, "step"]
    return [
        "The demo's model and data, 128 queries, fp32, one rank; the model is the base, before "
        "fine-tuning.",
        table([*header, "÷ GRPO"], [row(name, case, "grpo") for case, name in names.items()]),
        "OSW-FT with a given share of queries of weight 0, which are skipped:",
        table(
            [*header, "÷ none skipped"],
            [row(f"{case:.0%} skipped", case, 0.0) for case in turns if case not in names],
        ),
        goal("OSW-FT's step ÷ GRPO's", ratio(whole["oswft"], whole["grpo"]), "≤ 0.35"),
    ]


def endless_model(folder: Path, max_length: int) -> None:
    """Write a random tiny model that never ends its turn: a completion has the length asked for."""
    import torch
    from transformers import Qwen3ForCausalLM

    import tiny
    from data import stop_token_ids

    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    config = tiny.make_config(
        tokenizer,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1  # a direction that all hidden states share,
        model.lm_head.weight[stop_token_ids(tokenizer)] = -1  # and that speaks against stopping
    tiny.save_model(model, tokenizer, folder)


SCALING_PROMPT, SCALING_LENGTH, SCALING_BATCH = 24, 48, 32


def scaling_step(setup: Setup, num_rollouts: int = 2, longer: int = 1, larger: int = 1) -> float:
    """Seconds of a step of OSW-FT in which every completion and solution has the same length."""
    length = SCALING_LENGTH * longer
    queries = random_rows([(SCALING_PROMPT, length)] * SCALING_BATCH * larger, range(8, 18))
    return sum(step_of("oswft", setup, queries, num_rollouts, length).values())


def one_rank_step(model: Path, turns: int = 3) -> None:
    """Print the median seconds of a step over the ranks of the deepspeed launcher (see scaling).

    Args:
        model: folder.
        turns: steps after the first.
    """
    import torch.distributed as dist

    setup = prepare_training(model, 256, num_workers=1)
    seconds = [scaling_step(setup, larger=4) for _ in range(1 + turns)][1:]
    setup.verifier.__exit__()
    if dist.get_rank() == 0:
        print(f"seconds {statistics.median(seconds)}")


def launch_ranks(model: Path, ranks: int, threads: int) -> float:
    """Seconds of a step over so many ranks, each with so many threads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).parent / "deepspeed", "--num_accelerators", ranks]
    command += ["--master_port", port, "bench.py", "one-rank-step", "--model", model]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    result = subprocess.run(
        list(map(str, command)), cwd=HERE, env=environment, capture_output=True, text=True
    )
    found = re.search(r"seconds ([\d.]+)", result.stdout)
    if result.returncode or not found:
        sys.exit(f"error: {shlex.join(map(str, command))} failed:\n{result.stderr[-2000:]}")
    return float(found[1])


@section
def scaling(repetitions: int = 5) -> list[str]:
    """How OSW-FT's step time grows with K, completion length, batch, and ranks.

    Args:
        repetitions: turns.
    """
    cases = {
        "K = 1": {"num_rollouts": 1},
        "K = 2": {"num_rollouts": 2},
        "K = 4": {"num_rollouts": 4},
        "K = 8": {"num_rollouts": 8},
        "length ×1": {},
        "length ×2": {"longer": 2},
        "length ×4": {"longer": 4},
        "batch ×1": {},
        "batch ×2": {"larger": 2},
        "batch ×4": {"larger": 4},
    }
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        endless_model(model, 256)
        ranks = {
            "1 rank, 1 thread": lambda: launch_ranks(model, 1, 1),
            "2 ranks, 1 thread each": lambda: launch_ranks(model, 2, 1),
            f"1 rank, {cores} threads": lambda: launch_ranks(model, 1, cores),
        }
        by_ranks = take_turns(ranks, repetitions, warm_up=0)
        setup = prepare_training(model, 256)
        measured = take_turns(
            {name: lambda case=case: scaling_step(setup, **case) for name, case in cases.items()},
            repetitions,
        )
        setup.verifier.__exit__()
    rows, worst, first = [], 0.0, ""
    for name, seconds in measured.items():
        factor = int(name[-1])
        first = name if factor == 1 else first
        growth = ratio(seconds, measured[first])
        worst = max(worst, growth / factor) if factor > 1 else worst
        rows.append([name, f"{statistics.median(seconds):.3f}", f"{growth:.2f}", factor])
    alone, both, threads = by_ranks.values()
    rank_rows = [
        [name, f"{statistics.median(seconds):.3f}", f"{ratio(alone, seconds):.2f}"]
        for name, seconds in by_ranks.items()
    ]
    return [
        f"A random tiny model that never stops: {SCALING_BATCH} queries, prompts of "
        f"{SCALING_PROMPT} tokens, completions and solutions of {SCALING_LENGTH}, K = 2, fp32, "
        "every weight 1.",
        table(["", "s a step", "grown by", "linear"], rows),
        goal("the worst growth ÷ linear", worst, "≤ 1"),
        f"The same with {4 * SCALING_BATCH} queries, through the launcher:",
        table(["", "s a step", "faster than one thread by"], rank_rows),
        goal("2 ranks ÷ 1 rank on the same cores, seconds", ratio(both, threads), "≤ 1"),
    ]


# ------------------------------------------------------------------------------------------------
# Curation


def write_release(path: Path, num_bytes: int, seed: int = 0) -> None:
    """Write rows in the release's schema: three in five of NuminaMath, one in eight of all rows a
    multiple-choice question of NuminaMath; the tokens of a solution are log-normal about 3,500."""
    rng = np.random.default_rng(seed)

    def text(num_sentences: int) -> str:
        numbers = iter(rng.integers(1, 1000, 4 * num_sentences).tolist())
        chosen = rng.integers(len(SENTENCES), size=num_sentences).tolist()
        return " ".join(SENTENCES[i].format(*[next(numbers) for _ in range(4)]) for i in chosen)

    with path.open("w") as file:
        while file.tell() < num_bytes:
            numina, choice = rng.random() < 0.6, rng.random() < 0.21
            question, think = text(3), text(int(rng.lognormal(np.log(125), 0.7)) + 1)
            answer = str(rng.choice(list("ABCDE"))) if choice else str(rng.integers(1000))
            if choice:
                question += "".join(f"\n({letter}) {rng.integers(1000)}" for letter in "ABCDE")
            said = f"{text(12)}\n\n**Answer:** $\\boxed{{{answer}}}$"
            source = "NuminaMath_1.5" if numina else "openR1Math_extended"
            info = {"source": source, "category": "math", "ground_truth": answer}
            value = f"<think>{think}</think><answer>{said}</answer>"
            told = {"think_content": think, "answer_content": said, "verify_score": 1.0}
            human = {"from": "human", "value": question, "info": info}
            assistant = {"from": "assistant", "value": value, "info": told}
            file.write(json.dumps({"system": "", "conversations": [human, assistant]}) + "\n")


def peak_memory(process: subprocess.Popen) -> int:
    """Wait for a process; returns the bytes that it and its children held together at most."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # one has just ended
            tree = [root, *root.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in tree))
        time.sleep(0.1)
    return peak


@section
def curate(
    tokenizer: str = "Qwen/Qwen3-0.6B-Base", megabytes: int = 200, repetitions: int = 5
) -> list[str]:
    """Rows per second and memory of `data.py curate`, beside a loop that only parses the rows.

    Args:
        tokenizer: hub id or folder.
        megabytes: size of the generated release; a quarter of it shows that memory does not grow.
        repetitions: turns.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        whole, quarter = Path(folder, "whole.jsonl"), Path(folder, "quarter.jsonl")
        write_release(whole, megabytes * 10**6)
        write_release(quarter, megabytes * 10**6 // 4)
        count = {path: sum(1 for _ in path.open()) for path in (whole, quarter)}

        def run(release: Path, workers: int) -> tuple[float, int]:
            """Seconds of reading and sifting, as the command reports them, and peak memory."""
            command = [sys.executable, HERE / "data.py", "curate", "--input", release]
            command += ["--tokenizer", tokenizer, "--output", Path(folder, "train.jsonl")]
            command += ["--num_workers", workers, "--skip_benchmark_check", "--allow_fewer"]
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            peak = peak_memory(process)
            found = re.search(r"rows in ([\d.]+) s", process.communicate()[0])
            if process.returncode or not found:
                sys.exit(f"error: {shlex.join(process.args)} failed")
            return float(found[1]), peak

        def parse(release: Path, _: int) -> tuple[float, int]:
            return timed(lambda: [json.loads(line) for line in release.open("rb")] and None), 0

        cases = {
            "`json.loads` alone, one process": (parse, whole, 1),
            "`curate`, 1 worker": (run, whole, 1),
            f"`curate`, {cores} workers": (run, whole, cores),
            f"`curate`, {cores} workers, a quarter of the rows": (run, quarter, cores),
        }
        calls = {name: lambda c=call, a=args: c(*a) for name, (call, *args) in cases.items()}
        measured = take_turns(calls, repetitions, warm_up=0)
        rows = []
        for name, (_, release, workers) in cases.items():
            seconds = statistics.median(s for s, _ in measured[name])
            peak = max(peak for _, peak in measured[name])
            rate = release.stat().st_size / seconds / 1e6
            rows.append([name, f"{seconds:.1f}", f"{count[release] / seconds:,.0f}", f"{rate:.1f}"])
            rows[-1].append(f"{peak / 2**20:.0f}" if peak else "")
            if release == whole and workers == cores:
                minutes = RELEASE / rate / 1e6 / 60
        size = whole.stat().st_size / count[whole] / 1e3
    return [
        f"{count[whole]:,} generated rows of {size:.0f} kB, start-up left out.",
        table(["", "s", "rows/s", "MB/s", "peak memory, MiB"], rows),
        f"The release's 14.6 GB at the rate of {cores} workers: {minutes:.0f} min",
    ]


# ------------------------------------------------------------------------------------------------
# A GPU


QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


def matrix_rate(size: int, repetitions: int = 20) -> float:
    """FLOP/s of a bf16 matrix product, the best of several."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / min(timed(lambda: a @ b) for _ in range(repetitions))


def training_flops(config, num_parameters: int, length: int) -> float:
    """Of a token in forward and backward: 6 N, and causal attention's."""
    width = config.num_attention_heads * config.head_dim
    return 6 * num_parameters + 6 * config.num_hidden_layers * width * length


def train_on_lengths(config, lengths: list[int], max_tokens: int, repetitions: int) -> list[list]:
    """Rows of (length, tokens/s, FLOP/s, peak bytes) of SFT steps on rows of one length each."""
    import torch
    from transformers import Qwen3ForCausalLM

    import train_sft
    from engine import Engine

    be_alone()
    model = Qwen3ForCausalLM(config)
    num_parameters = model.num_parameters()
    engine = Engine(model, 1e-5, 1.0)
    measured = []
    for length in lengths:
        rows = random_rows([(length // 8, length - length // 8)] * 8, range(config.vocab_size))
        args = train_sft.Args(model="", data="", max_tokens_per_micro_batch=max_tokens)
        update = functools.partial(train_sft.update, engine, rows, args)
        update()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        rate = 8 * length / statistics.median(timed(update) for _ in range(repetitions))
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        measured.append([length, rate, rate * training_flops(config, num_parameters, length), peak])
    return measured


def sampled_per_second(config, prompts: int, tokens: int) -> float:
    """Tokens/s of vLLM, with random weights: `prompts` prompts of 128 tokens × 2."""
    from transformers import Qwen3ForCausalLM

    import tiny
    from rollout import Rollout

    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        ours = Rollout(folder, tiny.make_tokenizer(), 128 + tokens, load_weights_from_disk=True)
        rows = random_rows([(128, 1)] * prompts, range(8, 28))

        def sample() -> int:
            seeds = list(range(prompts))
            completions = ours.generate([row.prompt_ids for row in rows], 2, tokens, seeds)
            return sum(len(completion.token_ids) for completion in completions)

        sample()
        counted = []
        seconds = timed(lambda: counted.append(sample()))
    return counted[0] / seconds


@section
def gpu(repetitions: int = 5) -> list[str]:
    """Training, memory, the log-probability kernel and sampling of a random Qwen3-0.6B on a GPU.

    Args:
        repetitions: of each measurement.
    """
    from importlib.util import find_spec

    import torch
    from transformers import Qwen3Config

    if not torch.cuda.is_available():
        sys.exit("error: there is no CUDA GPU here")
    config = Qwen3Config(**QWEN3_06B)
    rate = matrix_rate(8192)
    rows, shares = [], []
    measured = train_on_lengths(config, [4096, 1024, 2048, 8192], 8192, repetitions)
    for length, tokens, flops, peak in measured:
        shares.append(flops / rate)
        rows.append([f"{length:,}", f"{tokens:,.0f}", f"{flops / 1e12:.0f}", f"{shares[-1]:.0%}"])
        rows[-1].append(f"{peak / 2**30:.1f}")
    cases = logprob_cases(4096, 151_936, 1024, torch.bfloat16, "cuda")
    sampled = "vLLM is not installed."
    if find_spec("vllm"):
        speed = sampled_per_second(config, 128, 1024)
        sampled = f"vLLM: {speed:,.0f} tokens/s from 128 prompts × 2, 1,024 tokens each."
    return [
        f"{torch.cuda.get_device_name()}; random Qwen3-0.6B, bf16, one rank, 8 rows to a step, "
        f"8,192 tokens at once. A bf16 product of 8,192³ runs at {rate / 1e12:.0f} TFLOP/s.",
        table(["length", "tokens/s", "TFLOP/s", "of that rate", "peak GiB"], rows),
        goal("share of the matrix rate at 4,096 tokens", shares[0], "≥ 0.5"),
        table(LOGPROB_HEADER, logprob_rows(cases, repetitions, "bf16")[0]),
        sampled,
    ]


# ------------------------------------------------------------------------------------------------
# Does it fit?


RESERVE = 2 * 2**30  # bytes of a GPU for CUDA's context, NCCL and fragmentation: assumed
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # what ZeRO gathers and reduces at a time


@functools.cache
def traced(model: str, precision: str) -> tuple[int, float, float]:
    """Of a model's config: parameters; bytes for backward, of a token and of a token in a layer.

    The forward pass is traced without data: what autograd keeps is counted, not estimated.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    from data import load_config
    from engine import LogprobModel

    tokens, kept = 1024, {}
    config = load_config(model, 1, "this tool")
    layers = config.num_hidden_layers
    with FakeTensorMode(allow_non_fake_inputs=True):
        num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        for config.num_hidden_layers in (1, 2):
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            network = LogprobModel(AutoModelForCausalLM.from_config(config, dtype=dtype))
            own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
            saved = {}

            def keep(tensor, own=own, saved=saved):
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    saved[storage._cdata] = storage.nbytes()
                return tensor

            ids = torch.zeros(1, tokens, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                network(ids, ids[0], torch.arange(tokens), 1.0)
            kept[config.num_hidden_layers] = sum(saved.values()) / tokens
    config.num_hidden_layers = layers
    per_layer = kept[2] - kept[1]
    return num_parameters, kept[1] - per_layer, per_layer


def memory(model: str, gpus: int, gpu_memory: float, args) -> dict[str, dict[str, float]]:
    """Bytes of one GPU by part, in each phase of a step.

    Args:
        gpu_memory: GiB of a GPU.
        args: a training script's arguments, `engine.RolloutArgs`.
    """
    from data import load_config
    from engine import GATHER_BYTES, LOGIT_TILE

    config = load_config(model, args.max_length, f"--max_length {args.max_length}")
    count, per_token, per_layer = traced(model, args.precision)
    size = 2 if args.precision == "bf16" else 4
    layers, width = config.num_hidden_layers, config.hidden_size
    stage = args.zero_stage if gpus > 1 else min(args.zero_stage, 2)
    tokens = max(args.max_tokens_per_micro_batch, args.max_length)

    held = {
        "weights": count * size / (gpus if stage == 3 else 1),
        "gradients": 0 if args.cpu_offload else count * 4 / (gpus if stage >= 2 else 1),
        "optimizer": 0 if args.cpu_offload else count * 12 / (gpus if stage >= 1 else 1),
    }
    if args.gradient_checkpointing:
        activations = tokens * (per_token + layers * width * size + per_layer)
    else:
        activations = tokens * (per_token + layers * per_layer)
    head = LOGIT_TILE["cuda"] * (4 + 4 + size) + config.vocab_size * width * size
    head += tokens * width * (4 + size)
    vllm_weights = count * size / args.vllm_tensor_parallel
    vllm = args.vllm_memory * gpu_memory * 2**30
    train = {
        **held,
        "gathered weights": min(count, LIVE_PARAMETERS) * size if stage == 3 else 0,
        "reduce bucket": REDUCE_BUCKET * size + min(count, REDUCE_BUCKET) * 4,
        "activations": activations,
        "a layer's backward": tokens * per_layer,
        "log-probabilities": head,
        "vLLM": 0 if args.vllm_sleep else vllm,
        "reserve": RESERVE,
    }
    sync = {
        **held,
        "buckets of weights": 2 * min(GATHER_BYTES, count * size) if stage == 3 else 0,
        "vLLM": vllm_weights if args.vllm_sleep else vllm,
        "reserve": RESERVE,
    }
    sample = {**held, "vLLM": vllm, "reserve": RESERVE}
    return {"train": train, "sync": sync, "sample": sample}


def epoch_tokens(
    queries: int, batch: int, prompt: float, solution: float, completion: float, skipped: float
) -> dict[str, tuple[float, float]]:
    """Tokens (sampled, trained) of one epoch, by method; a last, incomplete batch is not used.

    Args:
        queries: of the data set.
        batch: queries drawn at once.
        prompt, solution, completion: mean tokens.
        skipped: share of queries with weight 0, of groups without a signal.
    """
    used, left = queries // batch * batch, 1 - skipped
    return {
        "SFT": (0, used * (prompt + solution)),
        "OSW-FT, K=2": (2 * used * completion, used * left * (prompt + solution)),
        "GRPO, G=8": (8 * used * completion, 8 * used * left * (prompt + completion)),
    }


CURES = (
    {"vllm_sleep": True},
    {"gradient_checkpointing": True},
    {"max_tokens_per_micro_batch": None},  # as many as max_length
    {"vllm_memory": 0.5},
    {"vllm_tensor_parallel": 2},
    {"cpu_offload": True},
)


def cure(look: Callable, gpus: int, max_length: int) -> str:
    """A sentence that names the fewest flags with which a run fits."""
    for number in range(1, len(CURES) + 1):
        for cures in itertools.combinations(CURES, number):
            flags = {name: value or max_length for each in cures for name, value in each.items()}
            if gpus % flags.get("vllm_tensor_parallel", 1) == 0 and not look(**flags)[1]:
                shown = [f"--{n}" if v is True else f"--{n} {v}" for n, v in flags.items()]
                return f"It does with `{' '.join(shown)}`."
    return "No flag of the training scripts makes it fit: more GPUs, or larger ones."


@section
def plan(
    model: str,
    gpus: int = 8,
    gpu_memory: float = 80,
    zero_stage: int = 3,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    max_length: int = 5120,
    max_tokens_per_micro_batch: int = 8192,
    vllm_memory: float = 0.3,
    vllm_tensor_parallel: int = 1,
    vllm_sleep: bool = False,
    queries: int = 10_000,
    prompt_tokens: float = 200,
    solution_tokens: float = 2000,
    completion_tokens: float = 1000,
    skipped: float = 0.0,
) -> list[str]:
    """What a run would take, from the model's config alone: memory of a GPU, tokens of an epoch.

    Args:
        model: hub id or folder; no weights are read.
        gpus: of all hosts together.
        gpu_memory: GiB of each.
        zero_stage, gradient_checkpointing, cpu_offload, max_length, max_tokens_per_micro_batch,
            vllm_memory, vllm_tensor_parallel, vllm_sleep: as for train_oswft.py.
        queries: of the training set.
        prompt_tokens: mean.
        solution_tokens: mean; the paper's solutions have around 2,000.
        completion_tokens: mean of what the model answers; a guess, until a run has shown it.
        skipped: share of queries of weight 0, and of GRPO's groups without a signal.
    """
    from data import InputError
    from engine import RolloutArgs
    from rollout import kv_cache_bytes

    asked = {
        "zero_stage": zero_stage,
        "gradient_checkpointing": gradient_checkpointing,
        "cpu_offload": cpu_offload,
        "max_length": max_length,
        "max_tokens_per_micro_batch": max_tokens_per_micro_batch,
        "vllm_memory": vllm_memory,
        "vllm_tensor_parallel": vllm_tensor_parallel,
        "vllm_sleep": vllm_sleep,
    }

    def look(**flags) -> tuple[dict[str, dict[str, float]], list[str], float]:
        """Parts by phase, what does not fit, and the sequences that vLLM's share holds."""
        args = RolloutArgs(
            model=model, data="-", max_completion_length=max_length - 1, **{**asked, **flags}
        )
        args.check(world_size=gpus)
        phases = memory(model, gpus, gpu_memory, args)
        complaints = [
            f"{phase} takes {sum(parts.values()) / 2**30:.1f} GiB"
            for phase, parts in phases.items()
            if sum(parts.values()) > gpu_memory * 2**30
        ]
        room = phases["sample"]["vLLM"] - traced(model, "bf16")[0] * 2 / args.vllm_tensor_parallel
        cache = kv_cache_bytes(model, max_length, "bf16") / args.vllm_tensor_parallel
        if room < cache:
            complaints.append("vLLM's share does not hold the model and one sequence")
        return phases, complaints, room / cache

    try:
        phases, complaints, sequences = look()
    except InputError as error:
        sys.exit(f"error: {error}")
    rows = [
        [
            part,
            *(f"{parts[part] / 2**30:.2f}" if part in parts else "" for parts in phases.values()),
        ]
        for part in {part: None for parts in phases.values() for part in parts}
    ]
    sums = [f"**{sum(parts.values()) / 2**30:.2f}**" for parts in phases.values()]
    count = traced(model, "bf16")[0]
    if not complaints:
        verdict = "**It fits.**"
    else:
        verdict = f"**It does not fit**: {'; '.join(complaints)}. {cure(look, gpus, max_length)}"
    epoch = epoch_tokens(queries, 128, prompt_tokens, solution_tokens, completion_tokens, skipped)
    return [
        f"{model}: {count / 1e6:,.1f}M parameters, {gpus} GPUs of {gpu_memory:g} GiB, bf16. GiB of "
        "one GPU, by phase of a step:",
        table(["", *phases], [*rows, ["together", *sums]]),
        f"vLLM's share holds {max(0, sequences):.0f} sequences of {max_length:,} tokens at once.",
        verdict,
        f"An epoch of {queries:,} queries, with {prompt_tokens:g} tokens of prompt, "
        f"{solution_tokens:g} of solution, {completion_tokens:g} of completion, "
        f"{skipped:.0%} skipped:",
        table(
            ["tokens", "sampled", "trained"],
            [[name, f"{a / 1e6:,.1f}M", f"{b / 1e6:,.1f}M"] for name, (a, b) in epoch.items()],
        ),
    ]


# ------------------------------------------------------------------------------------------------
# Everything


def everything(
    tokenizer: str = "Qwen/Qwen3-0.6B-Base", output: Path = Path("BENCHMARKS.md")
) -> None:
    """Every section that this machine can run, each in a process of its own, into one file.

    Args:
        tokenizer: for curate, hub id or folder.
        output: what is written, after each section.
    """
    import torch

    from data import written_aside

    text = f"# Benchmarks\n\nWritten by `make bench`. {machine()}.\n\n"
    text += "Medians over turns, in which what is compared alternates. Ratios carry over to other "
    text += "machines, seconds do not.\n"
    if not torch.cuda.is_available():
        text += "\nWithout a GPU, nothing here says anything about one.\n"
    names = ["sft", "logprobs", "rollout", "sync", "verify", "step", "scaling", "curate"]
    names += ["gpu"] if torch.cuda.is_available() else []
    failed = []
    for name in names:
        command = [sys.executable, str(HERE / "bench.py"), name]
        command += ["--tokenizer", tokenizer] if name == "curate" else []
        print(f"\n$ {shlex.join(command)}", file=sys.stderr, flush=True)
        began = time.monotonic()
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            failed.append(name)
            text += f"\n## {name}\n\nfailed with status {result.returncode}\n"
        else:
            seconds = time.monotonic() - began
            text += f"\n## {name}\n\n{result.stdout.strip()}\n\n*{seconds:.0f} s*\n"
        print(result.stdout, flush=True)
        with written_aside(output) as aside:
            aside.write_text(text)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    functions = [sft, logprobs, rollout, sync, verify, step, scaling, curate, gpu, plan]
    commands = {function.__name__: function for function in functions}
    tyro.extras.subcommand_cli_from_dict(
        {**commands, "one-rank-step": one_rank_step, "all": everything},
        description=__doc__,
        args=[arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")],  # the launcher's
        use_underscores=True,
    )
