"""Run every section in a process of its own, and write BENCHMARKS.md: make bench"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from bench.measure import GOAL, markdown_table
from data import atomic_write
from run import parse_args, provenance

SECTIONS = ("step", "parts")
FAILED = "Failed."  # a section that prints nothing
HEAD = """# Benchmarks

Each part beside its usual alternative, in alternating runs: medians (least–largest); a ratio is the
median of each turn's ratio. A goal is reached if that and the quotient of the medians reach it.
[Costs](docs/costs.md) says what follows. Another machine has other seconds, and other ratios."""


def machine() -> str:
    """The machine and the versions, in a sentence."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    name = model[1].strip() if model else platform.processor()
    cpu = f"{name}, {os.cpu_count()} cores, {platform.machine()}"
    cpu += f", {psutil.virtual_memory().total / 2**30:.0f} GiB"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    return f"{cpu}; {gpu}; {versions}; commit {(found['git_commit'] or 'unknown')[:10]}."


def write_page(sections: dict[str, str], output: Path) -> None:
    """Write the sections, under a table of their goals."""
    goals = [
        [f"[{name}](#{name}): {part}", *others]
        for name, section in sections.items()
        for part, *others in re.findall(GOAL, section, re.M)
    ]
    parts = [HEAD, machine(), markdown_table(["part", "next to", "ratio", "goal"], goals)]
    for name, section in sections.items():
        parts += [f"## {name}", re.sub(f"\n*{GOAL}", "", section, flags=re.M)]
    with atomic_write(output) as partial:
        partial.write_text("\n\n".join(parts) + "\n")


def main(output: Path = Path("BENCHMARKS.md")) -> None:
    """Run every section. `output` is written after each of them."""
    sections = {}
    for name in (*SECTIONS, "gpu") if torch.cuda.is_available() else SECTIONS:
        print(f"\n$ python -m bench.{name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", f"bench.{name}"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
        sections[name] = text.strip() or FAILED
        print(sections[name], flush=True)
        write_page(sections, output)
    if FAILED in sections.values():
        sys.exit("error: a section failed")


if __name__ == "__main__":
    parse_args(main, __doc__)
