"""Per-token log-probabilities next to a dense log_softmax and gather: python -m bench.logprobs"""

import os
from functools import partial
from statistics import median

import torch

from bench.measure import (
    Ratio,
    extra_memory,
    goal,
    markdown_table,
    print_section,
    ratio,
    spread,
    take_turns,
)
from logprobs import LogprobHead

HEADER = ["", "s", "÷ dense", "extra peak memory, MiB", "÷ dense"]


def logprob_rows(
    precision: str, tokens: int, vocabulary: int, hidden_size: int, repetitions: int, device: str
) -> tuple[list[list], Ratio, Ratio]:
    """Rows of a table, of forward and backward; ours ÷ dense in seconds, and in extra memory."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16 if precision == "bf16" else torch.float32, "device": device}
    hidden = torch.randn(tokens, hidden_size, **options, requires_grad=True)
    linear = torch.nn.Linear(hidden_size, vocabulary, bias=False, **options)
    head, weight = LogprobHead(linear), linear.weight
    targets = torch.randint(vocabulary, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    def ours():
        return torch.autograd.grad(head(hidden, targets), [hidden, weight], upstream)

    def dense():
        logits = (hidden @ weight.T).float()
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        del logits
        return torch.autograd.grad(logprobs, [hidden, weight], upstream)

    def liger():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # needs a GPU

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)
        return torch.autograd.grad(loss, [hidden, weight])

    cases = [ours, dense, liger] if device == "cuda" else [ours, dense]
    calls = {case.__name__: partial(extra_memory, case, device) for case in cases}
    measured = {n: list(zip(*m, strict=True)) for n, m in take_turns(calls, repetitions).items()}
    rows, ratios = [], {}
    for name, (seconds, memory) in measured.items():
        time, size = ratios[name] = [*map(ratio, measured[name], measured["dense"])]
        row = [f"{precision}, {name}", spread(seconds, ".3g"), time]
        rows.append([*row, f"{median(memory) / 2**20:,.0f}", size])
    return rows, *ratios["ours"]


def main(
    tokens: int = 4096,
    vocabulary: int = 151_936,
    hidden_size: int = 1024,
    repetitions: int = 3,
    bf16: bool = torch.backends.cpu.get_cpu_capability() != "AVX2",
) -> list[str]:
    """Measure with hidden states and a head of these sizes; returns Markdown.

    Args:
        bf16: in bf16, too: with AVX2 alone torch takes hours for products of this size.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes, bounds = (tokens, vocabulary, hidden_size), {"bf16": "≤ 1.1", "fp32": "≤ 1.25"}
    table, goals = [], []
    for precision in ("bf16", "fp32") if bf16 else ("fp32",):
        rows, time, memory = logprob_rows(precision, *sizes, repetitions, "cpu")
        table += rows
        goals.append(goal(f"{precision}, s", "dense", time, bounds[precision]))
        goals.append(goal(f"{precision}, extra memory", "dense", memory, "≤ 0.15"))
    return [
        f"{tokens:,} tokens × {vocabulary:,} vocabulary, hidden size {hidden_size:,}; extra is "
        "what is held beyond the inputs and their gradients. The dense form takes three matrix "
        "products of this size, ours four, as it computes the logits again.",
        markdown_table(HEADER, table),
        *goals,
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
