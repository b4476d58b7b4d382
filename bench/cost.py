"""What a step costs on H100s, computed and not measured: python -m bench.cost --gpus 8

The formulas and the source of each constant are in docs/costs.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench import plan
from bench.measure import markdown_table, print_section
from rollout import MARGIN, MAX_SEQUENCES

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from tyro.conf import OmitArgPrefixes

QWEN3_ALL = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
QWEN3_ALL |= {"max_position_embeddings": 32_768, "tie_word_embeddings": True}
QWEN3 = {  # the paper's three models: width, its MLP's, layers, heads
    name: QWEN3_ALL
    | dict(hidden_size=h, intermediate_size=m, num_hidden_layers=n, num_attention_heads=heads)
    for name, h, m, n, heads in (
        ("0.6B", 1024, 3072, 28, 16),
        ("1.7B", 2048, 6144, 28, 16),
        ("4B", 2560, 9728, 36, 32),
    )
}
PEAK = 989e12  # FLOP/s of one H100 in bf16
# The share that training reaches, by width. The first was measured on an H200, the rest assumed.
MFU = {1024: 0.135, 2048: 0.25, 2560: 0.25}
BANDWIDTH, READ_SHARE = 3.35e12, 0.6  # bytes/s of its memory; the share that decoding reaches
LINK = 360e9  # bytes/s of a GPU's collectives over NVLink
DECODE_STEP = 2e-3  # s of vLLM's own work for each token of a batch
MEMORY = plan.Args.gpu_memory * 2**30  # bytes of one GPU
MICRO_BATCH = 8192  # tokens


@dataclass(kw_only=True)
class Args:
    gpus: int = 1
    queries: int = 128  # of a step
    rows: int = 10_000  # of an epoch
    prompt: int = 200  # tokens; assumed, as are the next four
    solution: int = 1500  # tokens of an expert's, on average
    answer: int = 1500  # tokens of the model's own, on average; lengths are exponential
    kept: float = 0.7  # share of the queries that OSW-FT gives a weight above 0
    mixed: float = 0.6  # share of the queries whose answers to GRPO are right and wrong
    max_completion_length: int = 4096


def num_parameters(config: Qwen3Config) -> int:
    with torch.device("meta"):
        return Qwen3ForCausalLM(config).num_parameters()


def training_flops(config: Qwen3Config, num_parameters: int, length: int) -> float:
    """Of a token in forward and backward: 6 for each parameter, and causal attention's."""
    width = config.num_attention_heads * config.head_dim
    return 6 * num_parameters + 6 * config.num_hidden_layers * width * length


def update_seconds(config: Qwen3Config, tokens: float, length: int, gpus: int) -> float:
    """Micro-batches of a step, ZeRO-2's collectives, and Adam."""
    count = num_parameters(config)
    size = 2 * count  # bytes in bf16
    flops = training_flops(config, count, length)
    compute = tokens / gpus * flops / (PEAK * MFU[config.hidden_size])
    # ZeRO-2 all-reduces the gradients of each micro-batch, and gathers the weights once
    sent = (2 * math.ceil(tokens / gpus / MICRO_BATCH) + 1) * size
    collectives = sent * (gpus - 1) / gpus / LINK
    adam = 15 * size / gpus / (BANDWIDTH * READ_SHARE)  # 30 bytes a parameter, read or written
    return compute + collectives + adam


def sampling_seconds(
    config: Qwen3Config, alive: Callable[[int], float], prompt: int, limit: int, gpus: int
) -> float:
    """Until the last of a GPU's answers has ended: `alive(t)` of them are longer than t tokens."""
    size = 2 * num_parameters(config)
    cached = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    held = size + 6 * size / gpus  # bytes that the trainer holds: ZeRO-2
    room = MEMORY - held - plan.CONTEXT - MARGIN - plan.VLLM_OWN - size
    if room <= 0:
        return math.inf  # trainer and vLLM do not fit
    seconds = 0.0
    for t in range(limit):
        if alive(t) == 0:
            break
        running = min(alive(t), MAX_SEQUENCES["cuda"], room / (cached * (prompt + t)))
        read = (size + running * cached * (prompt + t)) / (BANDWIDTH * READ_SHARE)
        compute = running * size / PEAK
        rounds = alive(t) / running * min(1, alive(t))  # below one: the chance that there is one
        seconds += rounds * (max(read, compute) + DECODE_STEP)
    return seconds


def step(config: Qwen3Config, method: str, args: Args) -> tuple[float, float]:
    """Seconds of a step: of sampling, and of the update. Verdicts and the sync take tenths."""
    samples = {"SFT": 0, "OSW-FT": 2, "GRPO": 8}[method]
    answers = args.queries * samples / args.gpus  # of a GPU
    limit, mean = args.max_completion_length, args.answer
    own = mean * (1 - math.exp(-limit / mean))  # what is left of the mean length at the limit
    trained = {  # tokens of a query, on average
        "SFT": args.prompt + args.solution,
        "OSW-FT": args.kept * (args.prompt + args.solution),
        "GRPO": args.mixed * samples * (args.prompt + own),
    }
    alive = lambda t: answers * math.exp(-t / mean)  # noqa: E731
    sampling = sampling_seconds(config, alive, args.prompt, limit, args.gpus) if samples else 0
    length, tokens = args.prompt + args.solution, args.queries * trained[method]
    return sampling, update_seconds(config, tokens, length, args.gpus)


def main(args: OmitArgPrefixes[Args]) -> list[str]:
    """The table as Markdown."""
    rows = []
    for name, sizes in QWEN3.items():
        for method in ("SFT", "OSW-FT", "GRPO"):
            seconds = step(Qwen3Config(**sizes), method, args)
            total = sum(seconds)
            hours = total * args.rows / args.queries * args.gpus / 3600
            figures = [f"{value:.1f}" for value in (*seconds, total, hours)]
            fits = math.isfinite(total)
            rows.append([f"{name}, {method}", *(figures if fits else ["too large"] * 4)])
    header = ["", "sampling", "update", "s a step", "GPU-hours an epoch"]
    return [f"{args.gpus} H100, by computation:", markdown_table(header, rows)]


if __name__ == "__main__":
    print_section(main, __doc__)
