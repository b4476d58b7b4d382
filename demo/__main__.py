"""The demo: SFT, OSW-FT and GRPO from one tiny base model, to a table and pictures.

    python -m demo                     # what `make demo` runs: some minutes on two CPU cores
    python -m demo --seed 2 --output_dir runs/demo2

Every command is shown, and can be typed by itself.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tyro

from demo.tiny import TIERS

LENGTHS = "--max_completion_length 48 --precision fp32"
# The paper gives GRPO a tenth of the others' learning rate; so tiny a model needs more.
METHODS = {
    "sft": "train_sft.py --learning_rate 1e-3",
    "oswft": "train_oswft.py --learning_rate 1e-3 --num_rollouts 2",
    "grpo": "train_grpo.py --learning_rate 3e-4 --num_rollouts 8",
}
PHASES = ("sync", "rollout", "verify", "train")


def demo(output_dir: Path = Path("runs/demo"), steps: int = 60, seed: int = 0) -> None:
    """Run SFT, OSW-FT and GRPO from the same base to a table and pictures.

    Args:
        output_dir: what an earlier demo left there is deleted.
        steps: optimizer steps of each method, of 128 queries each.
        seed: of data, weights and sampling.
    """
    shutil.rmtree(output_dir, ignore_errors=True)
    runs = shlex.quote(str(output_dir))
    heldout = " ".join(f"{runs}/base/heldout/{tier}.jsonl" for tier in TIERS)

    def evaluate(name: str, model: str) -> None:
        call(
            f"python evaluate.py --model {runs}/{name}/{model} --output_dir {runs}/{name}/eval "
            f"--benchmark_file {heldout} --num_samples 8 --temperature 1 --top_p 1 --top_k 0 "
            f"--seed {seed} {LENGTHS}"
        )

    started = time.perf_counter()
    call(f"python -m demo.tiny make --output_dir {runs}/base --seed {seed}")
    evaluate("base", "model")
    for name, script in METHODS.items():
        call(
            f"deepspeed --log_level error {script} --model {runs}/base/model "
            f"--data {runs}/base/train.jsonl --output_dir {runs}/{name} --max_steps {steps} "
            f"--seed {seed} {LENGTHS} --max_length 128"
        )
        evaluate(name, "final")
    call(f"python -m paper.tables compare {runs}/sft/eval {runs}/oswft/eval")
    folders = " ".join(f"{runs}/{name}" for name in ("base", *METHODS))
    call(f"python -m paper.plot {folders} --output_dir {runs}/plots")

    table = f"{scores_table(output_dir)}\n{time.perf_counter() - started:.0f} s in all\n"
    (output_dir / "report.txt").write_text(table)
    print(f"\n{table}\nwritten:")
    for path in sorted([*output_dir.glob("*/*"), output_dir / "report.txt"]):
        print(f"  {path}")


def call(command: str) -> None:
    """Show a command and run it; exit if it fails."""
    print(f"\n$ {command}", flush=True)
    status = subprocess.run(shlex.split(command)).returncode
    if status:
        sys.exit(f"error: status {status} from: {command}")


def scores_table(folder: Path) -> str:
    """Held-out scores, tokens and seconds: a row for the base, and one for each method."""
    tiers = "".join(f"{tier:^16}" for tier in TIERS)
    names = "  pass@1  pass@8" * len(TIERS) + f"{'sampled':>11}{'trained':>11}"
    lines = [
        f"{'':8}{tiers}{'tokens':^22}{'seconds':^32}",
        f"{'':8}{names}" + "".join(f"{phase:>8}" for phase in PHASES),
    ]
    for name in ("base", *METHODS):
        results = json.loads((folder / name / "eval" / "results.json").read_text())
        scores = [results[tier][k] for tier in TIERS for k in ("pass@1", "pass@8")]
        line = f"{name:8}" + "".join(f"{score:8.3f}" for score in scores)
        if name in METHODS:
            rows = [json.loads(row) for row in (folder / name / "metrics.jsonl").open()]
            for tokens in ("rollout_tokens", "train_tokens"):
                line += f"{sum(row.get(tokens, 0) for row in rows):11,}"
            for phase in PHASES:
                line += f"{sum(row.get(f'{phase}_s', 0) for row in rows):8.1f}"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    tyro.cli(demo, description=__doc__, use_underscores=True)
