"""Per-token log-probabilities next to a dense log_softmax and gather: python -m bench.logprobs"""

import os
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from bench.measure import extra_memory, goal, markdown_table, print_section, ratio, take_turns
from logprobs import LogprobHead

HEADER = ["", "s", "÷ dense", "extra peak memory, MiB", "÷ dense"]


def logprob_cases(
    tokens: int, vocabulary: int, hidden_size: int, dtype: torch.dtype, device: str
) -> dict[str, Callable]:
    """Functions that run forward and backward, and return the gradients."""
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": device}
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

    cases = {"ours": ours, "dense": dense}
    return {**cases, "Liger": liger} if device == "cuda" else cases


def logprob_rows(
    cases: dict[str, Callable], repetitions: int, label: str, device: str = "cpu"
) -> tuple[list[list], float, float]:
    """Rows of a table; ours ÷ dense in seconds, and in extra memory."""
    calls = {name: partial(extra_memory, case, device) for name, case in cases.items()}
    rows, ratios = [], {}
    measured = take_turns(calls, repetitions)
    dense_seconds, dense_memory = zip(*measured["dense"], strict=True)
    for name, values in measured.items():
        seconds, memory = zip(*values, strict=True)
        time, size = ratios[name] = ratio(seconds, dense_seconds), ratio(memory, dense_memory)
        row = [f"{label}, {name}", f"{median(seconds):.3g}", f"{time:.2f}"]
        rows.append([*row, f"{median(memory) / 2**20:,.0f}", f"{size:.3f}"])
    return rows, *ratios["ours"]


def main(
    tokens: int = 4096, vocabulary: int = 151_936, hidden_size: int = 1024, repetitions: int = 3
) -> list[str]:
    """Measure with hidden states and a head of these sizes; returns Markdown."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows, goals = [], []
    for label, dtype, bound in ("bf16", torch.bfloat16, "≤ 1.1"), ("fp32", torch.float32, "≤ 1.25"):
        cases = logprob_cases(tokens, vocabulary, hidden_size, dtype, "cpu")
        more, seconds, memory = logprob_rows(cases, repetitions, label)
        rows += more
        goals.append(goal(f"{label}, seconds ÷ dense", seconds, bound))
        goals.append(goal(f"{label}, extra memory ÷ dense", memory, "≤ 0.15"))
    return [
        f"{tokens:,} tokens × {vocabulary:,} vocabulary, hidden size {hidden_size:,}; extra is "
        "what is held beyond the inputs and their gradients. The dense form takes three matrix "
        "products of this size, ours four, as it computes the logits again.",
        markdown_table(HEADER, rows),
        *goals,
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
