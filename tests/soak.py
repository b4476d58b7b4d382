"""What no quick test can show: make soak (15 minutes on 2 cores).

    python tests/soak.py --parts kills shapes --seed 7   # some of it, at other moments

kills      20 kills with -9 at random moments, five each of SFT, OSW-FT, GRPO and the evaluation, on
           2 ranks: in the end every file equals an undisturbed run's, to the last byte
shapes     10 kills of one OSW-FT run, each followed by other ranks, another ZeRO stage and other
           memory flags: in the end the metrics equal the undisturbed run's, up to rounding
"""

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

# conftest.py finds the modules, too, and hides a GPU: two ranks cannot share one
from conftest import NO_CPU_VLLM, OFTEN, SCRIPTS, SETTING, TINY_LENGTHS, metrics, start
from demo.tiny import copy
from evaluate import read_samples

import pytest
import tyro

STEPS = {"train_sft.py": 240, "train_oswft.py": 48, "train_grpo.py": 24}
LENGTHS = [*TINY_LENGTHS, "--learning_rate", "1e-3"]


@dataclass
class Job:
    """A script with its arguments, and the files that it must leave."""

    script: str
    call: list
    folder: Path

    def begin(self, *more, ranks: int = 2) -> subprocess.Popen:
        call = [*self.call, "--output_dir", self.folder]
        if any(self.folder.glob("checkpoint-*")):
            call = ["--resume", self.folder]
        elif self.script in SCRIPTS:
            shutil.rmtree(self.folder, ignore_errors=True)  # killed before its first checkpoint
        call += more
        return start(self.script, *call, ranks=ranks, start_new_session=True)

    def finish(self, *more, ranks: int = 2) -> None:
        process = self.begin(*more, ranks=ranks)
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, output[-4000:]

    def progress(self) -> int:
        """Rows so far: of the metrics, or of the answers."""
        if self.script not in SCRIPTS:
            paths = list(self.folder.glob("samples.rank*.jsonl"))
        else:
            paths = [self.folder / "metrics.jsonl"]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def kill(self, rows: int, rng: random.Random, *more, ranks: int = 2) -> int:
        """Start it, and kill all of it when it has so many rows; returns how many it has then."""
        process = self.begin(*more, ranks=ranks)
        while self.progress() < rows:
            assert process.poll() is None, process.stdout.read()[-4000:]
            time.sleep(0.02)
        time.sleep(0.2 * rng.random())
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return self.progress()

    def results(self) -> dict[str, bytes | list]:
        """Every file that must be the same; metrics without their seconds."""
        if self.script not in SCRIPTS:
            return read_samples(self.folder)
        files = {"metrics": metrics(self.folder)}
        for path in [*self.folder.glob("rollouts/*"), self.folder / "final" / "model.safetensors"]:
            files[path.name] = path.read_bytes()
        return files


def jobs(tiny: Path, folder: Path) -> list[Job]:
    data = ["--model", tiny / "model", "--data", tiny / "train.jsonl", *LENGTHS]
    made = [
        Job(script, [*data, *SETTING[script], "--max_steps", STEPS[script]], folder / script)
        for script in SCRIPTS
    ]
    problems = [tiny / "heldout" / f"{tier}.jsonl" for tier in ("easy", "middle", "hard")]
    call = ["--model", tiny / "model", "--benchmark_file", *problems, *TINY_LENGTHS[2:]]
    script = folder / "evaluate_often.py"
    folder.mkdir()
    script.write_text(OFTEN)
    return [*made, Job(script, call, folder / "evaluation")]


def soak_kills(tiny: Path, folder: Path, rng: random.Random) -> None:
    whole, hurt = jobs(tiny, folder / "whole"), jobs(tiny, folder / "killed")
    for reference, job in zip(whole, hurt, strict=True):
        if NO_CPU_VLLM and job.script != "train_sft.py":
            print(f"{job.folder.name}: skipped, {NO_CPU_VLLM}", flush=True)
            continue
        reference.finish()
        part = reference.progress() // 6
        rows = [job.kill(part * n + rng.randrange(1, part), rng) for n in range(5)]
        job.finish()
        assert job.results() == reference.results(), job.folder
        print(f"{job.folder.name}: killed with {rows} rows; all files equal", flush=True)


SHAPES = {
    "--zero_stage": ("1", "2", "3"),
    "--max_tokens_per_micro_batch": ("200", "300", "2000"),
    "--verifier_workers": ("1", "2", "3"),
    "--vllm_memory": ("0.1", "0.2"),
}
SWITCHES = ("gradient_checkpointing", "cpu_offload")


def soak_shapes(tiny: Path, folder: Path, rng: random.Random) -> None:
    if NO_CPU_VLLM:
        return print(f"skipped, {NO_CPU_VLLM}", flush=True)
    whole, job = (jobs(tiny, folder / name)[1] for name in ("one shape", "shapes"))
    whole.finish()
    for number in range(11):
        ranks = rng.choice((1, 2, 3, 4))
        flags = [word for flag, values in SHAPES.items() for word in (flag, rng.choice(values))]
        flags += [rng.choice((f"--{switch}", f"--no_{switch}")) for switch in SWITCHES]
        if number == 10:
            job.finish(*flags, ranks=ranks)
        else:
            job.kill(4 * number + rng.randrange(1, 5), rng, *flags, ranks=ranks)
        print(f"{ranks} ranks {' '.join(flags)}: {job.progress()} steps", flush=True)
    gaps = []
    for ours, theirs in zip(metrics(job.folder), metrics(whole.folder), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-4), ours["step"]
        gaps.append(abs(ours["loss"] / theirs["loss"] - 1))
    print(f"loss: relative difference, median {median(gaps):.1e}, most {max(gaps):.1e}", flush=True)


PARTS = {"kills": soak_kills, "shapes": soak_shapes}


def main(
    parts: tuple[str, ...] = tuple(PARTS), seed: int = 0, output_dir: Path = Path("runs/soak")
) -> None:
    """Soak; the folder is emptied first.

    Args:
        parts: kills, shapes.
        seed: of the moments and the shapes.
    """
    shutil.rmtree(output_dir, ignore_errors=True)
    folder = output_dir.absolute()
    copy(folder / "tiny")
    for part in parts:
        started = time.monotonic()
        PARTS[part](folder / "tiny", folder, random.Random(seed))
        print(f"{part}: {(time.monotonic() - started) / 60:.0f} minutes\n", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, use_underscores=True)
