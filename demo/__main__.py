"""The demo: SFT, OSW-FT and GRPO from one tiny base, what each gains and what each keeps.

    python -m demo                     # what `make demo` runs: 100 to 200 s on two cores
    python -m demo --seed 2 --output_dir runs/demo2

It is the study (docs/study.md) at one setting, from the base that is committed. Every command is
shown, and can be typed by itself.
"""

import shlex
import shutil
import time
from pathlib import Path

import tyro

from data import InputError
from demo.study import DEMO, TITLES, Job, call, quote, read_run, run_all
from demo.world import GAIN, RETENTION, TIERS
from run import one_line_errors, read_args, write_args

MODELS = ("base", "sft", "oswft", "grpo")  # the lines of the table
ADVICE = """Gain is pass@1 on middle and hard, which fine-tuning shows, and retention that on keep
and long, which it never shows: look at how much retention SFT and OSW-FT pay for their gain.
Skill is retention where the expert's @ is forbidden: nothing is lost there, the model only answers
in a style in which it cannot do these. One seed proves nothing: docs/study.md has more of them."""


class DemoJob(Job):
    """A run whose folder has the name of its method, and whose end alone is scored."""

    checkpoints = 1

    @property
    def name(self) -> str:
        return self.method


def demo(output_dir: Path = Path("runs/demo"), steps: int = DEMO[1], seed: int = 0) -> None:
    """Run SFT, OSW-FT and GRPO from the same base to a table and pictures.

    Args:
        output_dir: what an earlier demo left there is deleted.
        steps: optimizer steps of each method, of 128 queries each.
        seed: of the data's order and of sampling.
    """
    if any(output_dir.glob("*")) and "demo" not in read_args(output_dir):
        raise InputError(f"{output_dir} holds no demo, but something else: choose another folder")
    shutil.rmtree(output_dir, ignore_errors=True)
    write_args(output_dir, demo={"steps": steps, "seed": seed})
    started = time.perf_counter()
    jobs = {name: DemoJob("style", name, DEMO[0], steps, seed) for name in MODELS}
    logs = output_dir / "logs"

    def show(command: str, log: Path) -> None:
        print(f"\n$ {command}\n  log: {log}", flush=True)
        call(command, log)

    def run(job: Job) -> None:
        log = logs / f"{job.name}.log"
        if job.method != "base":
            show(job.train_command(output_dir), log)
        show(job.score_command(output_dir), log)

    copy = f"python -m demo.tiny copy --output_dir {quote(output_dir / 'base')}"
    show(copy, logs / "base.log")
    run_all(run, [jobs[name] for name in ("grpo", "oswft", "sft", "base")], 2, "runs")

    folders = shlex.join(str(output_dir / name) for name in MODELS[1:])
    view_file = output_dir / "view.html"
    pictures = {
        "plot": f"python -m paper.plot {folders} --output_dir {quote(output_dir / 'plots')}",
        "view": f"python -m paper.view {folders} --output {quote(view_file)}",
    }
    run_all(lambda name: show(pictures[name], logs / f"{name}.log"), [*pictures], 2, "pictures")

    table = scores_table({name: read_run(job, output_dir) for name, job in jobs.items()})
    table += f"\n{time.perf_counter() - started:.0f} s in all\n\n{ADVICE}\n"
    (output_dir / "report.txt").write_text(table)
    print(f"\n{table}\nwritten:")
    for path in sorted([*output_dir.glob("*/*"), output_dir / "report.txt", view_file]):
        print(f"  {path}")


def scores_table(runs: dict[str, dict]) -> str:
    """Gain, retention and tokens, then pass@1 of each tier, in percent: a line for each model."""
    text = f"{'':16}{'gain':>8}{'retention':>11}{'skill':>7}{'pass@8':>8}"
    text += f"{'trained':>10}{'sampled':>10}" + "".join(f"{tier:>8}" for tier in TIERS) + "\n"
    for name, run in runs.items():
        last = run["checkpoints"][-1]
        scores = {tier: 100 * last["tiers"][tier]["pass@1"] for tier in TIERS}
        gain, retention = (sum(scores[t] for t in own) / len(own) for own in (GAIN, RETENTION))
        solved = sum(100 * last["tiers"][tier]["pass@8"] for tier in GAIN) / len(GAIN)
        skill = sum(100 * last["tiers"][tier]["skill"] for tier in RETENTION) / len(RETENTION)
        text += f"{TITLES[name]:16}{gain:8.1f}{retention:11.1f}{skill:7.1f}{solved:8.1f}"
        text += f"{last['trained_tokens']:10,}{last['sampled_tokens']:10,}"
        text += "".join(f"{score:8.1f}" for score in scores.values()) + "\n"
    return text


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(demo, description=__doc__, use_underscores=True)
