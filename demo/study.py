"""The study: SFT, OSW-FT and their rivals in a small world, over learning rates and seeds.

    python -m demo.study          # what `make study` runs: three methods, four seeds
    python -m demo.study --full   # docs/study/plan.md: hours; after a stop, the same again
    python -m demo.study --third  # docs/study/plan3.md; goes on from the rows in docs/study
    python -m demo.report         # the page and its picture, from the results in docs/study

A study is a list of runs. Each is one of the repository's own scripts, with real vLLM and
DeepSpeed, in a process of its own on one core. Its checkpoints are scored on the six tiers of
demo/world.py, and it leaves a file in results/. A run that has one is skipped.
"""

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import tyro
from tqdm import tqdm

from data import InputError, read_rows, write_json, write_rows
from demo.world import GAIN, MAX_COMPLETION, MAX_LENGTH
from evaluate import model_version
from run import one_line_errors, provenance

SEEDS = tuple(range(18, 26))  # reported: no setting was chosen on them
CHOOSING_SEEDS = (0, 1)
WORLDS = {  # name -> the training set
    "style": "train",  # the expert writes in another style than the base
    "own": "train-plain",  # in the base's own
    "self": "train-self",  # the base's own right answers, where it has some
    "both-wrong": "train-both-wrong",  # a tenth of the keys and solutions
    "key-wrong": "train-key-wrong",
    "solution-wrong": "train-solution-wrong",
    # of the third study, all made by prepare.weigh with K = 8
    "clean": "clean",  # the set of "style"
    "wrong": "wrong",  # the set of "both-wrong"
    "clean-audited": "clean-audited",  # without its suspects
    "wrong-audited": "wrong-audited",
    "clean-self": "clean-self",  # the base's own right answers, where it has some
}
WEIGHED, OSWFT = "train_sft.py --weight_column", "train_oswft.py --num_rollouts"
METHODS = {  # name -> title, command
    "sft": ("SFT", "train_sft.py"),
    "oswft": ("OSW-FT, K = 2", f"{OSWFT} 2"),
    "static": ("static weights", f"{WEIGHED} weight"),
    "grpo": ("GRPO, G = 8", "train_grpo.py --num_rollouts 8"),
    "permuted": ("permuted weights", f"{WEIGHED} permuted"),
    "permuted-in-tiers": ("weights permuted within tiers", f"{WEIGHED} permuted_in_tiers"),
    "tier-means": ("tier means as weights", f"{WEIGHED} tier_mean"),
    "solvable": ("static weights, never solved left out", f"{WEIGHED} solvable"),
    "unsolved": ("solved left out", f"{WEIGHED} unsolved"),
    "oswft-sequence": ("OSW-FT, K = 2, by sequence", f"{OSWFT} 2 --normalizer sequence"),
    "grpo-g2": ("GRPO, G = 2", "train_grpo.py --num_rollouts 2"),
    "grpo-g4": ("GRPO, G = 4", "train_grpo.py --num_rollouts 4"),
}
TITLES = {name: title for name, (title, _) in METHODS.items()}
TITLES |= {f"oswft-k{k}": f"OSW-FT, K = {k}" for k in (1, 4, 8)}  # of the first study
TITLES |= {"base": "base", "random": "random weights, K = 4"}
DEMO = (3e-4, 24)  # learning rate and steps of the demo
RATES = {2.5e-5: 576, 5e-5: 288, 1e-4: 144}  # the same product
SUPERVISED = ("sft", "oswft", "static")
WRONG = ("both-wrong", "key-wrong", "solution-wrong")
FULL = (  # world, methods, learning rates with their steps, seeds
    # E1: which queries, or only how much?
    ("style", SUPERVISED, RATES, CHOOSING_SEEDS),
    ("style", SUPERVISED, RATES, SEEDS),
    ("style", ("permuted", "permuted-in-tiers", "tier-means"), {5e-5: 288}, SEEDS),
    # E2: what if the reference is wrong? SFT reads no key: with wrong keys it is E1's run.
    *((world, ("oswft", "static", "solvable"), {1e-4: 144}, SEEDS) for world in WRONG),
    ("both-wrong", ("sft",), {1e-4: 144}, SEEDS),
    ("solution-wrong", ("sft",), {1e-4: 144}, SEEDS),
    # E3: own answers where there are some
    ("self", ("sft", "static"), {1e-4: 144}, SEEDS),
    ("style", ("unsolved",), {1e-4: 144}, SEEDS),
    # E4: what the first study left out
    ("style", ("grpo-g2", "grpo-g4", "grpo"), {3e-4: 48}, SEEDS[:4]),
    ("style", ("oswft-sequence",), {1e-4: 144}, SEEDS[:4]),
)
SHORT = (("style", SUPERVISED, {5e-5: 288}, SEEDS[:4]),)
THIRD_SEEDS, STATIC_K = tuple(range(26, 34)), 8
THIRD = (  # world, methods, learning rates with their steps; a seed after the other
    # A: wrong references, and what one look at the base's answers repairs
    ("wrong", SUPERVISED, {1e-4: 144}),
    ("wrong-audited", SUPERVISED, {1e-4: 144}),
    ("clean", ("static", "oswft"), {1e-4: 144}),
    ("clean-audited", ("static",), {1e-4: 144}),
    # C: GRPO and own answers
    ("clean", ("grpo",), {3e-4: 48}),
    ("clean-self", ("sft", "static"), {1e-4: 144, 3e-4: 48}),
    # B: is it only a lower rate?
    ("clean", SUPERVISED, {2.5e-5: 576}),
)
THIRD_LAST = ("clean", SUPERVISED, {1.25e-5: 1152})  # after all seeds of the others
ENOUGH = 0.82  # gain of a checkpoint after which a run of B may end, says the plan


@dataclass(frozen=True)
class Job:
    """One training run, or with method "base" the making of its base."""

    world: str
    method: str
    rate: float
    steps: int
    seed: int
    checkpoints: ClassVar[int] = 12  # evenly spaced, all scored

    @property
    def name(self) -> str:
        if self.method == "base":
            return f"base-{self.seed}"
        return f"{self.world}-{self.method}-{self.rate:g}-{self.steps}-{self.seed}"

    @property
    def script(self) -> str:
        """The training script with the method's flags; empty for a base."""
        return "" if self.method == "base" else METHODS[self.method][1]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """First and last checkpoint of each part. A run may end after any of them."""
        slow = self.seed in THIRD_SEEDS and 0 < self.rate < 5e-5
        return ((1, 6), (7, 9), (10, 12)) if slow else ((1, self.checkpoints),)

    @property
    def base(self) -> "Job":
        return replace(self, world="style", method="base", rate=0.0, steps=0)  # one for all worlds

    def train_command(self, root: Path, part: tuple[int, int] | None = None) -> str:
        """What makes the base, or trains up to a part's end; as one would type it."""
        if self.method == "base":
            return (
                f"python -m demo.tiny make --output_dir {quote(root / self.name)} "
                f"--seed {self.seed}"
            )
        base = root / self.base.name
        data = base / f"{WORLDS[self.world]}.jsonl"
        flags = "" if self.script.startswith("train_sft") else " --verifier_workers 1"
        first, last = part or (1, self.checkpoints)
        flags += f" --resume {quote(root / self.name)}" if first > 1 else ""
        every = self.steps // self.checkpoints
        return (
            f"python {self.script} --model {quote(base / 'model')} "
            f"--data {quote(data)} --output_dir {quote(root / self.name)} "
            f"--learning_rate {self.rate:g} --max_steps {every * last} "
            f"--save_every {every} --keep_checkpoints 99 "
            f"--seed {self.seed} --max_length {MAX_LENGTH} "
            f"--max_completion_length {MAX_COMPLETION} --precision fp32{flags}"
        )

    def weigh_commands(self, root: Path) -> list[str]:
        """What makes the training sets of the third study from a base's answers."""
        base = root / self.name
        call = (
            f"python -m prepare.weigh --model {quote(base / 'model')} --num_rollouts {STATIC_K} "
            f"--seed {self.seed} --max_length {MAX_LENGTH} "
            f"--max_completion_length {MAX_COMPLETION} --precision fp32 --verifier_workers 1"
        )
        commands = [f"python -m demo.variants --base {quote(base)} --seed {self.seed}"]
        for output, data, flag in (
            ("clean", "train", ""),
            ("clean-audited", "train", " --suspects drop"),
            ("clean-self", "train", " --own_answers"),
            ("wrong", "train-both-wrong", ""),
            ("wrong-audited", "train-both-wrong", " --suspects drop"),
        ):
            answers = base / f"{output.partition('-')[0]}.answers"  # one pass for each set
            files = f"--data {quote(base / data)}.jsonl --output {quote(base / output)}.jsonl"
            commands.append(f"{call} {files} --answers {quote(answers)}{flag}")
        return commands

    def score_command(self, root: Path, part: tuple[int, int] | None = None) -> str:
        """What answers the held-out problems: the models of a part's checkpoints, first to last."""
        folder = root / self.name
        models = {0: folder / "model"}
        if self.method != "base":
            every = self.steps // self.checkpoints
            first, last = part or (1, self.checkpoints)
            steps = range(first * every, last * every + 1, every)
            models = {step: folder / f"checkpoint-{step:06d}" for step in steps}
        named = " ".join(f"{step} {quote(model)}" for step, model in models.items())
        return (
            f"python -m demo.score --base {quote(root / self.base.name)} --models {named} "
            f"--output {quote(folder / 'scores.json')} --seed {self.seed}"
        )


def needs_base_answers(world: str, command: str) -> bool:
    """Whether the base first answers all training problems: for weights, solutions, suspects."""
    return "weight_column" in command or world.endswith(("self", "audited"))


def quote(path: Path) -> str:
    return shlex.quote(str(path))


# ---- One run -------------------------------------------------------------------------------------

_running: set[subprocess.Popen] = set()


def call(command: str, log: Path) -> None:
    """Run a command on one core; what it prints is appended to `log`.

    Raises ChildProcessError with the log's last line if it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        print(f"$ {command}", file=out, flush=True)
        words = [sys.executable, *shlex.split(command)[1:]]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(words, env=env, stdout=out, stderr=subprocess.STDOUT) as process:
            _running.add(process)
            process.wait()
            _running.discard(process)
    if process.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1]
        raise ChildProcessError(f"{log}: status {process.returncode}: {last}")


def run_all(function: Callable, jobs: Sequence, workers: int, title: str) -> None:
    """`function` of each job, some at a time. If one fails, or at Ctrl-C, no other one begins."""
    if not jobs:
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no run is left behind
    with ThreadPoolExecutor(workers) as pool:
        try:
            done = as_completed([pool.submit(function, job) for job in jobs])
            for future in tqdm(done, total=len(jobs), desc=title, unit="run"):
                future.result()
        except KeyboardInterrupt:
            for process in tuple(_running):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_job(job: Job, root: Path) -> None:
    """Do a run, score its checkpoints, and write its row to results/."""
    folder, started = root / job.name, time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)  # half a run
    log = root / "logs" / f"{job.name}.log"
    log.unlink(missing_ok=True)
    third, scored, scores = job.seed in THIRD_SEEDS, {}, folder / "scores.json"
    static = " --static_weights" if job.method == "base" and not third else ""
    for part in job.parts:
        call(job.train_command(root, part), log)
        call(job.score_command(root, part) + static, log)
        found = json.loads(scores.read_text())
        scored |= found["models"]
        write_json({**found, "models": scored}, scores)
        if any(gain(tiers) > ENOUGH for tiers in found["models"].values()):
            break
    for weigh in job.weigh_commands(root) if job.method == "base" and third else ():
        call(weigh, log)
    seconds = round(time.perf_counter() - started)
    # of a whole run: the checkpoints say where it ended
    row = {**asdict(job), "command": job.train_command(root), "seconds": seconds}
    row |= {**provenance(), "machine": machine(), **read_run(job, root)}
    if "wrong" in job.world:
        row["spoiled_share"] = spoiled_share(job, root)
    if third:
        row |= {"base": base_hash(job, root), "ended": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    if third and job.method == "base":
        row["suspects"] = count_suspects(job, root)
    write_json(row, result(job, root))
    if job.method != "base":
        shutil.rmtree(folder)  # gigabytes, of all runs; the log stays


def result(job: Job, root: Path) -> Path:
    return root / "results" / f"{job.name}.json"


def gain(tiers: dict[str, dict[str, float]]) -> float:
    """Of a scored checkpoint."""
    return sum(tiers[tier]["pass@1"] for tier in GAIN) / len(GAIN)


def read_run(job: Job, root: Path) -> dict:
    """The scores of a run's checkpoints, and the tokens that it had trained on and sampled."""
    scores = json.loads((root / job.name / "scores.json").read_text())
    spent = {0: {"trained_tokens": 0, "sampled_tokens": 0}}
    trained = sampled = 0
    base = root / job.base.name
    if needs_base_answers(job.world, job.script):
        answers = base / f"{job.world.partition('-')[0]}.answers"
        if answers.exists():  # the third study's
            files = answers.glob("samples.*.jsonl")
            sampled = sum(row["tokens"] for path in files for _, row in read_rows(str(path)))
        else:
            sampled = json.loads((base / "scores.json").read_text())["static_tokens"]
    metrics = root / job.name / "metrics.jsonl"
    for _, row in read_rows(str(metrics)) if metrics.exists() else ():
        trained += row["train_tokens"]
        sampled += row.get("rollout_tokens", 0)
        spent[row["step"]] = {"trained_tokens": trained, "sampled_tokens": sampled}
    checkpoints = [
        {"steps": int(step), **spent[int(step)], "tiers": tiers}
        for step, tiers in scores["models"].items()
    ]
    return {"parameters": scores["parameters"], "checkpoints": checkpoints}


def base_hash(job: Job, root: Path) -> str:
    """Of the weights that a run begins with: another processor may make others."""
    return model_version(str(root / job.base.name / "model"))[:16]


def count_suspects(base: Job, root: Path) -> dict[str, dict[str, list[int]]]:
    """By set and tier: rows, spoiled rows, suspects, spoiled suspects."""
    found = {}
    for name in ("clean", "wrong"):
        for n, path in enumerate((f"{name}.jsonl", f"{name}.suspects.jsonl")):
            for _, row in read_rows(str(root / base.name / path)):
                counts = found.setdefault(name, {}).setdefault(row["source"], [0] * 4)
                counts[2 * n] += 1
                counts[2 * n + 1] += row.get("spoiled", False)
    return found


def spoiled_share(job: Job, root: Path) -> list[float]:
    """The share of the weights that spoiled rows have: at each step, or in the data as a whole."""
    rows = [row for _, row in read_rows(f"{root / job.base.name / WORLDS[job.world]}.jsonl")]
    spoiled = {row["id"] for row in rows if row["spoiled"]}
    column = re.search(r"weight_column (\w+)", job.script)
    steps = [[(row["id"], row[column[1]] if column else 1.0) for row in rows]]
    if (root / job.name / "rollouts").exists():
        steps = [
            [(row["id"], row["weight"]) for _, row in read_rows(str(path))]
            for path in sorted((root / job.name / "rollouts").iterdir())
        ]
    return [
        round(sum(w for i, w in step if i in spoiled) / sum(w for _, w in step), 4)
        for step in steps
    ]


def machine() -> str:
    """The kind of machine: rows of different kinds are not alike."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    name = model[1].strip() if model else platform.processor()
    return f"{name}, {os.cpu_count()} cores, {platform.machine()}"


# ---- The study -----------------------------------------------------------------------------------


def jobs_of(plan: Iterable[tuple]) -> list[Job]:
    return [
        Job(world, method, rate, steps, seed)
        for world, methods, rates, seeds in plan
        for seed in seeds
        for method in methods
        for rate, steps in rates.items()
    ]


def third_jobs(seeds: Sequence[int]) -> list[Job]:
    """Of docs/study/plan3.md: seed by seed, then the longest runs."""
    return jobs_of([*((*part, (seed,)) for seed in seeds for part in THIRD), (*THIRD_LAST, seeds)])


def restore(rows: Path, output_dir: Path) -> None:
    """Results that were committed count as done here."""
    for _, row in read_rows(str(rows)) if rows.exists() else ():
        job = Job(**{field.name: row[field.name] for field in fields(Job)})
        if not result(job, output_dir).exists():
            write_json(row, result(job, output_dir))


def forget_other_bases(bases: Iterable[Job], output_dir: Path) -> None:
    """Drop the results of seeds whose base came out otherwise: all runs of a seed share one."""
    for base in bases:
        for path in (output_dir / "results").glob(f"*-{base.seed}.json"):
            if json.loads(path.read_text()).get("base") != base_hash(base, output_dir):
                print(f"{path.stem} began with another base: it is run anew", flush=True)
                path.unlink()


def study(
    output_dir: Path = Path("runs/study"),
    full: bool = False,
    third: bool = False,
    seeds: tuple[int, ...] = THIRD_SEEDS,
    workers: int = 2,
) -> None:
    """Train and score all runs that have no result yet, then write the tables and the picture.

    Args:
        output_dir: a study that was stopped there is continued.
        full: all of docs/study/plan.md; otherwise SFT, OSW-FT and static weights at one learning
            rate, on four seeds.
        third: all of docs/study/plan3.md.
        seeds: of the third study.
        workers: runs side by side, one core each.
    """
    if workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    if third and not set(seeds) <= set(THIRD_SEEDS):
        raise InputError(f"--seeds of the third study are {THIRD_SEEDS[0]} to {THIRD_SEEDS[-1]}")
    (output_dir / "results").mkdir(parents=True, exist_ok=True)
    jobs = third_jobs(seeds) if third else jobs_of(FULL if full else SHORT)
    if third:
        restore(Path("docs/study/third.jsonl"), output_dir)

    def find_missing() -> list[Job]:
        return [job for job in jobs if not result(job, output_dir).exists()]

    def run(job: Job) -> None:
        run_job(job, output_dir)

    needed = dict.fromkeys(job.base for job in find_missing())
    bases = [base for base in needed if not (output_dir / base.name / "scores.json").exists()]
    print(f"{len(jobs)} runs, to do: {len(find_missing())}, and {len(bases)} bases", flush=True)
    try:
        run_all(run, bases, workers, "bases")
        if third:
            forget_other_bases(needed, output_dir)
        run_all(run, find_missing(), workers, "runs")
    finally:  # also of a part
        paths = sorted((output_dir / "results").glob("*.json"))
        write_rows([json.loads(path.read_text()) for path in paths], output_dir / "results.jsonl")
    report = [sys.executable, "-m", "demo.report", "--output_dir", str(output_dir)]
    report += ["--third" if third else "--second", str(output_dir / "results.jsonl")]
    subprocess.run(report, check=True)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(study, description=__doc__, use_underscores=True)
