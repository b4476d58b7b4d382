"""The demo: SFT, OSW-FT and GRPO from one tiny base, what each gains and what each keeps.

    python -m demo                     # what `make demo` runs: four minutes on two CPU cores
    python -m demo --seed 2 --output_dir runs/demo2

It is one seed of the study (docs/study.md) at one setting. Every command is shown, and can be typed
by itself.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

from data import InputError
from demo.report import TITLES
from demo.study import DEMO, Job, points, run_job, stop
from demo.world import TIERS
from run import read_args, write_args

METHODS = ("sft", "oswft", "grpo")
ADVICE = """Gain is pass@1 on middle and hard, which fine-tuning shows, and retention that on keep
and long, which it never shows: look at how much retention SFT and OSW-FT pay for their gain.
One seed of a tiny model proves nothing: docs/study.md has more of them, with intervals."""


class DemoJob(Job):
    """A run whose folder has the name of its method."""

    @property
    def name(self) -> str:
        return self.method


def demo(output_dir: Path = Path("runs/demo"), steps: int = DEMO[1], seed: int = 0) -> None:
    """Run SFT, OSW-FT and GRPO from the same base to a table and pictures.

    Args:
        output_dir: what an earlier demo left there is deleted.
        steps: optimizer steps of each method, of 128 queries each.
        seed: of data, weights and sampling.
    """
    if any(output_dir.glob("*")) and "demo" not in read_args(output_dir):
        raise InputError(f"{output_dir} holds no demo, but something else: choose another folder")
    shutil.rmtree(output_dir, ignore_errors=True)
    write_args(output_dir, demo={"steps": steps, "seed": seed})
    started = time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    jobs = [DemoJob("style", name, DEMO[0], steps, seed) for name in METHODS]

    def run(job: Job) -> dict:
        print(f"\n$ {job.command(output_dir)}\n  log: {output_dir}/logs/{job.name}.log", flush=True)
        row = run_job(job, output_dir, offline_pass=False)
        print(f"\n{TITLES[job.method]}: done, {row['seconds']} s", flush=True)
        return row

    rows = [run(jobs[0].base)]
    with ThreadPoolExecutor(2) as pool:  # two at a time, the longest first
        futures = [pool.submit(run, job) for job in reversed(jobs)]
        try:
            rows += reversed([future.result() for future in futures])
        except BaseException:
            stop(futures)
            raise
    folders = [str(output_dir / job.name) for job in jobs]
    plot = ["python", "-m", "paper.plot", *folders, "--output_dir", str(output_dir / "plots")]
    view_file = output_dir / "view.html"
    view = ["python", "-m", "paper.view", *folders, "--output", str(view_file)]
    for command in (plot, view):
        print(f"\n$ {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, *command[1:]], check=True)

    table = f"{scores_table(rows)}\n{time.perf_counter() - started:.0f} s in all\n\n{ADVICE}\n"
    (output_dir / "report.txt").write_text(table)
    print(f"\n{table}\nwritten:")
    for path in sorted([*output_dir.glob("*/*"), output_dir / "report.txt", view_file]):
        print(f"  {path}")


def scores_table(rows: list[dict]) -> str:
    """Gain, retention and tokens, then pass@1 of each tier, in percent: a line for each model."""
    names = "".join(f"{tier:>8}" for tier in TIERS)
    lines = [
        f"{'':16}{'gain':>8}{'retention':>11}{'pass@8':>8}{'trained':>10}{'sampled':>10}{names}"
    ]
    for point in points(rows):
        if point["world"] == "style":
            tiers = "".join(f"{point[tier]:8.1f}" for tier in TIERS)
            lines.append(
                f"{TITLES[point['method']]:16}{point['gain']:8.1f}{point['retention']:11.1f}"
                f"{point['pass@8']:8.1f}{point['trained_tokens']:10,}"
                f"{point['sampled_tokens']:10,}{tiers}"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        tyro.cli(demo, description=__doc__, use_underscores=True)
    except (InputError, ChildProcessError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
