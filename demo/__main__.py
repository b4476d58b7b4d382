"""The demo: SFT, OSW-FT and GRPO from one tiny base, what each gains and what each keeps.

    python -m demo                     # what `make demo` runs: 100 to 200 s on two cores
    python -m demo --seed 2 --output_dir runs/demo2

Every command is shown, and can be typed as it stands. docs/demo.md describes the world.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from data import InputError, read_rows
from demo.score import NUM_SAMPLES
from demo.world import GAIN, MAX_COMPLETION, MAX_LENGTH, RETENTION, TIERS
from evaluate import score_with_interval
from launch import command_line
from look.plot import STYLE
from run import read_args, write_args

import numpy as np
import tyro
from matplotlib import rc_context
from matplotlib.figure import Figure

TITLES = {"base": "base", "sft": "SFT", "oswft": "OSW-FT, K = 2", "grpo": "GRPO, G = 8"}
LOOKS = (("*", "black"), ("o", "#c44e52"), ("s", "#4c72b0"), ("^", "#8172b3"))  # of their points
SCRIPTS = {
    "sft": "train_sft.py",
    "oswft": "train_oswft.py --num_rollouts 2",
    "grpo": "train_grpo.py --num_rollouts 8",
}
ADVICE = """Gain is pass@1 on middle and hard, which fine-tuning shows, and retention that on keep
and long, which it never shows: look at how much retention SFT and OSW-FT pay for their gain.
Skill is retention where the expert's @ is forbidden: nothing is lost there, the model only answers
in a style in which it cannot do these. Trained and sampled are numbers of tokens. One seed proves
nothing: docs/study.md has more of them, under "What to try, in this order"."""


def demo(output_dir: Path = Path("runs/demo"), steps: int = 24, seed: int = 0) -> None:
    """Run SFT, OSW-FT and GRPO from the same base to a table and pictures.

    Args:
        output_dir: what an earlier demo left there is deleted.
        steps: optimizer steps of each method, of 128 queries each.
        seed: of the data's order and of sampling.
    """
    if steps < 1 or seed < 0:
        raise InputError("--steps must be at least 1, and --seed at least 0")
    if any(output_dir.glob("*")) and "demo" not in read_args(output_dir):
        raise InputError(f"{output_dir} holds no demo, but something else: choose another folder")
    shutil.rmtree(output_dir, ignore_errors=True)
    write_args(output_dir, demo={"steps": steps, "seed": seed})
    started = time.perf_counter()

    def show(name: str, command: str) -> None:
        log = output_dir / "logs" / f"{name}.log"
        print(f"\n$ {command}\n  log: {log}", flush=True)
        call(command, log)

    def run(name: str) -> None:
        begun = time.perf_counter()
        folder, model = output_dir / name, output_dir / "base" / "model"
        if name != "base":
            show(name, train_command(SCRIPTS[name], output_dir / "base", folder, steps, seed))
            model = folder / f"checkpoint-{steps:06d}"
        show(
            name,
            f"python -m demo.score --base {quote(output_dir / 'base')} --model {quote(model)} "
            f"--output {quote(folder / 'scores.json')} --seed {seed}",
        )
        print(f"\n{TITLES[name]}: done in {time.perf_counter() - begun:.0f} s", flush=True)

    show("base", f"python -m demo.tiny copy --output_dir {quote(output_dir / 'base')}")
    run_all(run, ("grpo", "oswft", "sft", "base"))

    table = scores_table({name: output_dir / name for name in TITLES})
    table += f"\ntrained and scored in {time.perf_counter() - started:.0f} s\n\n{ADVICE}\n"
    (output_dir / "report.txt").write_text(table)
    print(f"\n{table}", end="", flush=True)

    draw_gain({name: output_dir / name for name in TITLES}).savefig(output_dir / "gain.svg")
    folders = shlex.join(str(output_dir / name) for name in SCRIPTS)
    view_file = output_dir / "view.html"
    pictures = {
        "plot": f"python -m look.plot {folders} --output_dir {quote(output_dir / 'plots')}",
        "view": f"python -m look.view {folders} --output {quote(view_file)}",
    }
    run_all(lambda name: show(name, pictures[name]), tuple(pictures))
    print(f"\nwritten: {output_dir / 'report.txt'}; look at {output_dir / 'gain.svg'}, {view_file}")


def train_command(script: str, base: Path, folder: Path, steps: int, seed: int) -> str:
    flags = "" if script.startswith("train_sft") else " --verifier_workers 1"
    return (
        f"python {script} --model {quote(base / 'model')} --data {quote(base / 'train.jsonl')} "
        f"--output_dir {quote(folder)} --learning_rate 3e-4 --max_steps {steps} "
        f"--save_every {steps} --seed {seed} --max_length {MAX_LENGTH} "
        f"--max_completion_length {MAX_COMPLETION} --precision fp32{flags}"
    )


def scores_table(runs: dict[str, Path]) -> str:
    """Gain, retention and tokens, then pass@1 of each tier, in percent: a line for each model."""
    text = f"{'':16}{'gain':>8}{'retention':>11}{'skill':>7}{'pass@8':>8}"
    text += f"{'trained':>10}{'sampled':>10}" + "".join(f"{tier:>8}" for tier in TIERS) + "\n"
    for name, folder in runs.items():
        tiers = json.loads((folder / "scores.json").read_text())
        metrics = folder / "metrics.jsonl"
        steps = [row for _, row in read_rows(str(metrics))] if metrics.exists() else []

        def mean(own: Sequence[str], score: str, tiers: dict = tiers) -> float:
            return 100 * sum(tiers[tier][score] for tier in own) / len(own)

        text += f"{TITLES[name]:16}{mean(GAIN, 'pass@1'):8.1f}{mean(RETENTION, 'pass@1'):11.1f}"
        text += f"{mean(RETENTION, 'skill'):7.1f}{mean(GAIN, 'pass@8'):8.1f}"
        for tokens in ("train_tokens", "rollout_tokens"):
            text += f"{sum(row.get(tokens, 0) for row in steps):10,}"
        text += "".join(f"{mean([tier], 'pass@1'):8.1f}" for tier in TIERS) + "\n"
    return text


def draw_gain(runs: dict[str, Path]) -> Figure:
    """Gain against retention: a point for each model, with 95 % intervals over the problems."""
    with rc_context(STYLE | {"font.size": 11, "axes.titlesize": 12}):
        figure = Figure(figsize=(5, 4.6))
        axes = figure.subplots()
        for (name, folder), (marker, color) in zip(runs.items(), LOOKS, strict=True):
            tiers = json.loads((folder / "scores.json").read_text())
            point, errors = [], []
            for own in (GAIN, RETENTION):
                counts = np.concatenate([tiers[tier]["right"] for tier in own])
                score, bounds = score_with_interval(counts, NUM_SAMPLES, 1)
                point.append(100 * score)
                errors.append([[100 * abs(score - bound)] for bound in bounds])
            look = {"fmt": marker, "color": color, "markersize": 8, "capsize": 3}
            axes.errorbar(*point, *errors[::-1], label=TITLES[name], **look)
        axes.set(title="What each method gains, and what it keeps", xlim=(0, 103), ylim=(0, 103))
        axes.set(xlabel="gain: pass@1 on new problems of trained kinds (%)")
        axes.set(ylabel="retention: pass@1 on kinds never trained (%)")
        axes.legend(loc="lower left", title="with 95 % intervals", fontsize=11)
    return figure


# ---- Commands, two side by side ------------------------------------------------------------------


def quote(path: Path) -> str:
    return shlex.quote(str(path))


def call(command: str, log: Path) -> None:
    """Run a command on one core; what it prints is appended to `log`.

    Raises ChildProcessError with the log's last line if it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        print(f"$ {command}", file=out, flush=True)
        words = [sys.executable, *shlex.split(command)[1:]]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=env, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1]
        raise ChildProcessError(f"{log}: status {done.returncode}: {last}")


def run_all(function: Callable[[str], None], names: Sequence[str]) -> None:
    """`function` of each name, two at a time. If one fails, or at Ctrl-C, no other one begins."""
    with ThreadPoolExecutor(2) as pool:
        try:
            for done in as_completed([pool.submit(function, name) for name in names]):
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with command_line():
        tyro.cli(demo, description=__doc__, use_underscores=True)
