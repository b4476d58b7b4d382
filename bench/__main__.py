"""Print the head of BENCHMARKS.md; make bench appends the sections."""

import os
import platform
import re
from pathlib import Path

from run import provenance

import psutil
import torch

HEAD = """# Benchmarks

Each part beside its usual alternative, in turns: medians (least–largest). *÷ ours* is the median of
the turns' ratios; a goal is reached if it and the ratio of the medians reach it.
[Costs](docs/costs.md) says what follows. Another machine has other seconds, and other ratios.
"""


def machine() -> str:
    """The machine and the versions, in a sentence."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found = provenance()
    versions = ", ".join(" ".join(pair) for pair in sorted(found["versions"].items()))
    return (
        f"{model[1].strip() if model else platform.processor()}, {os.cpu_count()} cores, "
        f"{platform.machine()}, {psutil.virtual_memory().total / 2**30:.0f} GiB; {gpu}; "
        f"{versions}; commit {(found['git_commit'] or 'unknown')[:10]}.\n"
    )


if __name__ == "__main__":
    print(HEAD, machine(), sep="\n")
