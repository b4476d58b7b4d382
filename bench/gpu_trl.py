"""SFT, and a whole step with two answers a query, beside TRL's on a GPU: python -m bench.gpu_trl

A random Qwen3-0.6B on made-up rows of the paper's lengths, so that nearly all answers reach their
limit. Each trainer has a process of its own, as two of vLLM's engines do not fit into one. TRL's
models are in bf16 throughout; ours also keep fp32 weights. TRL does not score its answers again.
Its SFT may take cuDNN's attention, which vLLM turns off, and so do our scripts.
"""

import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Literal

from bench.gpu import QWEN3
from bench.measure import markdown_table, print_section, spread
from bench.parts import load_rows
from bench.step import COLD, SETTINGS, batch, make_grpo_trainer, make_trainer, warm_steps
from data import write_rows
from models import load_tokenizer
from recipes.trainer_run import to_columns

import torch
import trl
from transformers import Qwen3Config, Qwen3ForCausalLM

Seconds = list[tuple[float, float]]  # of each step: in all, and of it in vLLM
ANY_LENGTH = 2**20


def make_files(folder: Path, tokenizer: str, queries: int, length: int) -> None:
    """Write model/, and data.jsonl with solutions of `length` tokens."""
    words = load_tokenizer(tokenizer)
    config = Qwen3Config(**QWEN3, eos_token_id=words.eos_token_id)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    solution = words.decode(words.encode("7 " * length, add_special_tokens=False)[:length])
    row = {"question": "7 + 8", "solution": solution, "answer": "15", "source": "bench"}
    write_rows([{"id": str(number), **row} for number in range(queries)], folder / "data.jsonl")


# ---- The contestants -----------------------------------------------------------------------------


def ours(script: str, steps: int, **flags) -> Seconds:
    rows = warm_steps(script, steps, **flags)
    return [(sum(row.values()), row.get("sync_s", 0) + row.get("rollout_s", 0)) for row in rows]


def sft_by_trl(model: Path, data: Path, queries: int, **options) -> Seconds:
    options |= batch(queries, at_once=2)  # 8,192 tokens, as ours
    config = trl.SFTConfig(max_length=None, **options, **SETTINGS)
    columns = to_columns(load_rows(model, data, ANY_LENGTH))
    trainer, clock = make_trainer(trl.SFTTrainer, model, columns, config)
    trainer.train()
    return [(seconds, 0) for seconds in clock.seconds[COLD:]]


def grpo_by_trl(model: Path, data: Path, queries: int, **options) -> Seconds:
    options |= {"use_vllm": True, "vllm_importance_sampling_correction": False}
    options |= batch(2 * queries, at_once=4)  # 8,500 tokens
    trainer, clock = make_grpo_trainer(model, load_rows(model, data, ANY_LENGTH), 2, **options)
    vllm, calls = trainer.vllm_generation, []

    def clocked(call: Callable, *args, **kwargs):
        began = time.perf_counter()
        found = call(*args, **kwargs)
        calls.append(time.perf_counter() - began)
        return found

    vllm.sync_weights = partial(clocked, vllm.sync_weights)
    vllm.generate = partial(clocked, vllm.generate)
    trainer.train()
    in_vllm = [sync + sample for sync, sample in zip(calls[::2], calls[1::2], strict=True)]
    return list(zip(clock.seconds, in_vllm, strict=True))[COLD:]


# ---- The page ------------------------------------------------------------------------------------


def measure(title: str, cases: dict[str, Callable[[], Seconds]]) -> str:
    """A table of what each case takes in a process of its own, beside the first.

    Rows are also printed on stderr, as soon as they are known.
    """
    table, first = [], None
    for name, case in cases.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            try:
                steps, in_vllm = zip(*process.submit(case).result(), strict=True)
                first = first if table else median(steps)
                ratio = f"{median(steps) / first:.2f}" if first else ""
                row = [name, spread(steps, ".3g"), spread(in_vllm, ".3g"), ratio]
            except Exception as error:  # a compiler's, or no memory: the others still count
                traceback.print_exception(error)
                row = [name, "failed", "", ""]
        print(*row, sep=" | ", file=sys.stderr, flush=True)
        table.append(row)
    return markdown_table([title, "a step", "of it in vLLM", "÷ ours"], table)


def main(
    tokenizer: str = "Qwen/Qwen3-0.6B-Base",
    queries: int = 32,
    length: int = 3900,
    max_tokens: int = 2048,
    steps: int = 3,
    only: Literal["sft", "whole"] | None = None,
) -> Iterator[str]:
    """Measure; yields Markdown, table by table.

    Args:
        tokenizer: folder or hub id of a tokenizer with a chat template.
        queries: of a step.
        length: of a solution, in tokens.
        max_tokens: of an answer.
        steps: that count, after two others.
        only: one of the tables; whole: steps of OSW-FT and GRPO.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, tokenizer, queries * (COLD + steps), length)
        files = {"model": folder / "model", "data": folder / "data.jsonl"}
        answers, fits = {"max_completion_length": max_tokens}, length + 1000
        flags = {**files, **answers, "max_length": fits, "train_batch_size": queries}
        vllm = {**answers, "vllm_max_model_length": fits}
        script = partial(ours, steps=steps, **flags)
        sft = {
            "`train_sft.py`": partial(script, "train_sft.py"),
            "TRL's SFTTrainer": partial(sft_by_trl, **files, queries=queries),
        }
        whole = {
            "`train_oswft.py`": partial(script, "train_oswft.py", rollout_batch_size=queries),
            "TRL's GRPOTrainer, vLLM": partial(grpo_by_trl, **files, queries=queries, **vllm),
        }
        if gpu := torch.cuda.is_available():
            for cases in (sft, whole):
                _, their = list(cases)
                if find_spec("liger_kernel"):
                    cases[f"{their}, Liger"] = partial(cases[their], use_liger_kernel=True)
                cases[f"{their}, torch_compile"] = partial(cases[their], torch_compile=True)
        yield "## gpu_trl"
        yield (
            f"{torch.cuda.get_device_name() if gpu else 'No GPU'}; TRL {trl.__version__}; random "
            f"Qwen3-0.6B, bf16, {queries} solutions of {length:,} tokens a step; two answers of "
            f"{max_tokens:,} tokens to each question. GRPO trains on the answers."
        )
        if only != "whole":
            yield measure("SFT, s", sft)
        if only != "sft":
            yield measure("whole steps, s", whole)


if __name__ == "__main__":
    print_section(main, __doc__)
