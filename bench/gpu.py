"""Training and sampling of a random Qwen3-0.6B on a GPU: python -m bench.gpu"""

import tempfile
from collections.abc import Iterator
from functools import partial
from statistics import median

import train_sft
from bench.measure import print_section, timed
from bench.parts import logprobs
from data import Example, InputError, Query
from demo.tiny import make_tokenizer
from engine import Engine, EngineArgs, init_training
from look import markdown_table
from rollout import Rollout, RolloutArgs

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

QWEN3 = {  # the sizes of Qwen3-0.6B
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


def random_rows(lengths: list[tuple[int, int]], vocabulary: range) -> list[Query]:
    """Rows of random tokens with the given lengths of prompt and completion."""
    draw = partial(np.random.default_rng(0).integers, vocabulary.start, vocabulary.stop)
    example = Example("-", "-", "-", "7", "bench")
    return [Query("-", draw(first), draw(then), example) for first, then in lengths]


def matrix_rate(size: int) -> float:
    """FLOP/s of a bf16 matrix product, the best of several."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / min(timed(lambda: a @ b) for _ in range(20))


def train_on_lengths(
    engine: Engine, lengths: list[int], repetitions: int, best: float
) -> list[list[str]]:
    """A table's row for SFT on rows of each length; `best` is the FLOP/s of a matrix product."""
    config, count = engine.model.config, engine.model.num_parameters()
    width = config.num_attention_heads * config.head_dim
    table = []
    for length in lengths:
        rows = random_rows([(length // 8, length - length // 8)] * 8, range(config.vocab_size))
        args = train_sft.Args(model="", data="")
        update = partial(train_sft.update, engine, rows, torch.ones(len(rows)), args)
        update()
        torch.cuda.reset_peak_memory_stats()
        rate = 8 * length / median(timed(update) for _ in range(repetitions))
        # forward and backward: 6 for each parameter, and causal attention's
        flops = rate * 6 * (count + config.num_hidden_layers * width * length)
        row = [f"{length:,}", f"{rate:,.0f}", f"{flops / 1e12:.0f}"]
        peak = torch.cuda.max_memory_allocated() / 2**30
        table.append([*row, f"{flops / best:.0%}", f"{peak:.1f}"])
    return table


def sampled_per_second(config: Qwen3Config, prompts: int, tokens: int) -> float:
    """Tokens/s of vLLM, with random weights and 2 answers to each prompt of 128 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        # 0.3 of 80 GiB has no room for 256 answers at once.
        options = RolloutArgs(max_length=128 + tokens, vllm_memory=0.6)
        rollout = Rollout(folder, make_tokenizer(), options, load_from_disk=True)
    prompt_ids = [row.prompt_ids for row in random_rows([(128, 1)] * prompts, range(8, 28))]

    sample = partial(rollout.generate, prompt_ids, 2, tokens, seeds=list(range(prompts)))
    sample()
    return 2 * prompts * tokens / timed(sample)  # random weights hardly ever end an answer


def main(repetitions: int = 5) -> Iterator[str]:
    """Measure; yields Markdown, part by part: a run that is cut off shows what came before."""
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA GPU here")
    config, lengths = Qwen3Config(**QWEN3), [4096, 1024, 2048, 8192]
    best = matrix_rate(8192)
    yield "## gpu"
    yield (
        f"{torch.cuda.get_device_name()}; random Qwen3-0.6B, bf16, one rank, 8 rows to a step, "
        f"8,192 tokens at once. A bf16 product of 8,192³ runs at {best / 1e12:.0f} TFLOP/s."
    )
    init_training()
    engine = Engine(Qwen3ForCausalLM(config), EngineArgs())
    header = ["tokens/s", "TFLOP/s", "of it", "peak GiB"]
    rows = train_on_lengths(engine, lengths, repetitions, best)
    yield markdown_table(["length", *header], rows)
    yield "The goal at 4,096 tokens is 50 % of the product."
    yield from logprobs(repetitions, 4096, config.vocab_size, "bf16", "cuda")
    speed = sampled_per_second(config, 128, 1024)
    yield f"vLLM: {speed:,.0f} tokens/s from 128 prompts × 2, 1,024 tokens each."


if __name__ == "__main__":
    print_section(main, __doc__)
