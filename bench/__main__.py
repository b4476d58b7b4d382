"""Everything that this machine can run, into BENCHMARKS.md. Each section has a process of its own.

    make bench               # installs what is compared with, too
    python -m bench.sft      # one section: its Markdown goes to stdout

What is compared takes turns, and a figure is the median over the turns. Quote ratios: they hold on
other machines, seconds do not.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from bench import growth
from data import atomic_write
from run import parse_args, provenance

SECTIONS = ("sft", "logprobs", "rollout", "sync", "verify", "step", "peers", "mfu")
SECTIONS += ("start", "scaling", "rows", "curate")


def machine() -> str:
    """The machine and the versions, in a sentence."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    what = f"{len(os.sched_getaffinity(0))} cores of {model[1] if model else 'a CPU'}"
    what += f", {psutil.virtual_memory().total / 2**30:.0f} GiB"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    commit = (found["git_commit"] or "unknown")[:10]
    return f"{what}; {', '.join(gpus) or 'no GPU'}; {versions}; commit {commit}"


def main(tokenizer: str = "Qwen/Qwen3-0.6B-Base", output: Path = Path("BENCHMARKS.md")) -> None:
    """Run every section; `tokenizer` is for curate. `output` is written after each of them."""
    text = f"# Benchmarks\n\nWritten by `make bench`. {machine()}.\n\n"
    text += "Medians over turns, in which what is compared alternates. Ratios carry over to other "
    text += "machines, seconds do not.\n"
    cuda, failed = torch.cuda.is_available(), []
    if not cuda:
        text += "\nWithout a GPU, nothing here says anything about one.\n"
    for name in (*SECTIONS, "gpu") if cuda else SECTIONS:
        command = [sys.executable, "-m", f"bench.{name}"]
        command += ["--tokenizer", tokenizer] if name == "curate" else []
        print(f"\n$ {shlex.join(command)}", file=sys.stderr, flush=True)
        began = time.monotonic()
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        seconds = time.monotonic() - began
        if result.returncode:
            failed.append(name)
            text += f"\n## {name}\n\nfailed with status {result.returncode}\n"
        else:
            text += f"\n## {name}\n\n{result.stdout.strip()}\n\n*{seconds:.0f} s*\n"
        print(result.stdout, flush=True)
        with atomic_write(output) as partial:
            partial.write_text(text)
    if not {"scaling", "rows"} & set(failed):
        growth.main(output)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    parse_args(main, __doc__)
