"""How to measure in turns, and the tables that come out."""

import ctypes
import functools
import gc
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from launch import command_line, parse_args
from look import markdown_table

import psutil
import torch
from tqdm import tqdm


def compare(
    title: str, cases: dict[str, Callable], repetitions: int, goals: dict[str, float]
) -> str:
    """A Markdown table of what the cases return, less is better: each beside the first, ours.

    Each is called once a turn, with its number; every other turn is in reverse. The first turn
    does not count, unless it is the only one. `goals` say how many times better ours should be, in
    both ratios.
    """
    measured: dict[str, list[float]] = {name: [] for name in cases}
    turns = repetitions + 1 if repetitions > 1 else 1
    orders = list(cases), list(reversed(cases))
    for turn in tqdm(range(turns), desc="turns"):
        for name in orders[turn % 2]:
            measured[name].append(cases[name](turn))
    measured = {name: values[-repetitions:] for name, values in measured.items()}
    ours, *_ = measured.values()
    rows = []
    for name, values in measured.items():
        ratios = [a / b for a, b in zip(values, ours, strict=True)]
        quotient, goal = median(values) / median(ours), goals.get(name, "")
        if goal:
            reached = min(median(ratios), quotient) >= goal
            goal = f"≥ {goal}: {'reached' if reached else 'NOT reached'}"
        shown = spread(values, ",.0f" if median(values) > 1000 else ".3g")
        rows.append([name, shown, spread(ratios, ".2f"), f"{quotient:.2f}", goal])
    return markdown_table([title, "", "÷ ours", "of medians", "goal"], rows)


def spread(values: Sequence[float], form: str) -> str:
    """A cell: the median, with the least and the largest."""
    return "{} ({}–{})".format(*(f"{f(values):{form}}" for f in (median, min, max)))


def timed(call: Callable, turn: int = 0) -> float:
    """Seconds that a call takes, with its work on the GPU; `turn` is what `compare` gives."""
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


def print_section(main: Callable[..., Iterable[str]], description: str) -> None:
    """Print the paragraphs of a section; what libraries and child processes print is on stderr."""

    @functools.wraps(main)  # the flags are those of main
    def run(*args, **kwargs) -> None:
        with os.fdopen(os.dup(1), "w") as output:
            os.dup2(2, 1)
            for paragraph in main(*args, **kwargs):
                print(paragraph, end="\n\n", file=output, flush=True)

    with command_line():
        parse_args(run, description)
