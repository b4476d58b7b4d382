"""How to measure in turns, and how to write down what was measured."""

import ctypes
import functools
import gc
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import torch
from tqdm import tqdm

from run import one_line_errors, parse_args

GOAL = r"^- (.*) ÷ (.*): \*\*(.*)\*\* \((.*)\)$"  # what the lines of `goal` look like


def take_turns(
    cases: dict[str, Callable], repetitions: int, warm_up: int = 1, seeded: bool = False
) -> dict[str, list]:
    """Call every case once a turn, in reverse every other turn; returns what the calls returned.

    The `warm_up` turns come first and do not count; where a single turn is asked for, it counts.
    `seeded` cases are called with the turn's number as their `seed`.
    """
    warm_up = warm_up if repetitions > 1 else 0
    measured: dict[str, list] = {name: [] for name in cases}
    for turn in tqdm(range(warm_up + repetitions), desc="turns"):
        for name in list(cases)[:: -1 if turn % 2 else 1]:
            value = cases[name](seed=turn) if seeded else cases[name]()
            if turn >= warm_up:
                measured[name].append(value)
    return measured


class Ratio(NamedTuple):
    """What one case takes, divided by what another takes in the same turn."""

    of_turns: list[float]  # in a turn both saw the machine in the same state
    of_medians: float

    def __str__(self) -> str:
        return spread(self.of_turns, ".2f" if median(self.of_turns) >= 0.1 else ".3f")


def ratio(above: list[float], below: list[float]) -> Ratio:
    """above / below over the turns."""
    values = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(values, median(above) / median(below))


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """A cell: the median, with the least and the largest."""
    return "{} ({}–{})".format(*(f"{f(values):{form}}" for f in (median, min, max)))


def timed(call: Callable) -> float:
    """Seconds that a call takes, with its work on the GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def extra_memory(call: Callable, device: str = "cpu") -> int:
    """Peak bytes of a call that returns tensors, less those held before and returned.

    Of the GPU where `device` is "cuda", else of this process.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not look like free memory
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, status = psutil.Process().memory_info().rss, Path("/proc/self/status")
        peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) * 1024  # noqa: E731
    kept = call()
    return peak() - before - sum(tensor.nbytes for tensor in kept)


def markdown_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; its first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def goal(part: str, beside: str, value: Ratio, bound: str) -> str:
    """A line of the page's first table; `bound` is like "≥ 1.3" or "≤ 3", or a word on why none.

    It is reached if the median of the turns' ratios and the quotient of the medians both reach it.
    """
    if bound[0] in "≥≤":
        limit, both = float(bound.split()[1]), (median(value.of_turns), value.of_medians)
        reached = min(both) >= limit if bound[0] == "≥" else max(both) <= limit
        bound += ": reached" if reached else ": NOT reached"
    return f"- {part} ÷ {beside}: **{value}** ({bound})"


def compare(
    title: str, calls: dict[str, Callable], repetitions: int, bounds: dict[str, str], **turns
) -> list[str]:
    """Markdown of what the calls return, less is better: of each next to the first, ours.

    `bounds` are the goals of how many times better the first is than another.
    """
    measured = take_turns(calls, repetitions, **turns)
    ours, *_ = measured.values()
    form = ",.0f" if median(ours) > 1000 else ".3g"
    ratios = {name: ratio(values, ours) for name, values in measured.items()}
    rows = [[name, spread(measured[name], form), ratios[name]] for name in calls]
    goals = [goal(title, name, ratios[name], bound) for name, bound in bounds.items()]
    return [markdown_table([title, "", "÷ ours"], rows), *goals]


def print_section(main: Callable[..., list[str]], description: str) -> None:
    """Run a section with the flags of the command line; print the paragraphs it returns.

    What libraries and child processes print goes to stderr.
    """

    @functools.wraps(main)  # the flags are those of main
    def run(*args, **kwargs) -> None:
        with os.fdopen(os.dup(1), "w") as output:
            os.dup2(2, 1)
            print("\n\n".join(main(*args, **kwargs)), file=output)

    with one_line_errors():
        parse_args(run, description)
