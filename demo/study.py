"""The study: SFT, OSW-FT and their rivals in a small world, each at its best settings, over seeds.

    python -m demo.study             # what `make study` runs: half an hour on two cores
    python -m demo.study --full      # all of it: hours; the same command goes on after a stop
    python -m demo.report            # docs/study.md and its pictures, from docs/study/results.json

Each run is one of the repository's own scripts, with real vLLM and DeepSpeed, in a process of its
own on one core. Its checkpoints are scored on the six tiers of demo/world.py. A method's settings
are those that score best on CHOOSING_SEEDS; what is reported comes from SEEDS.
"""

import json
import multiprocessing
import os
import platform
import runpy
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro
from tqdm import tqdm

from data import InputError, atomic_write, read_rows
from demo.score import NUM_SAMPLES, OFFLINE_SAMPLES, offline_weights, score
from demo.world import BASES, GAIN, RETENTION, TIERS, TRAIN_MIX
from run import differences, provenance, read_args, write_args

SEEDS = tuple(range(10, 18))  # reported: no setting was chosen on them
CHOOSING_SEEDS = (0, 1)
WORLDS = {  # name -> the base, and the expert's solutions
    "style": ("usual", "train"),  # in another style than the base's own
    "own": ("usual", "train-plain"),
    "weak": ("weak", "train"),
}
METHODS = {
    "sft": "train_sft.py",
    "oswft": "train_oswft.py --num_rollouts 2",
    "static": "train_sft.py --weight_column weight",
    "grpo": "train_grpo.py --num_rollouts 8",
    "oswft-k1": "train_oswft.py --num_rollouts 1",
    "oswft-k4": "train_oswft.py --num_rollouts 4",
    "oswft-k8": "train_oswft.py --num_rollouts 8",
    "hard": "train_oswft.py --num_rollouts 2 --weighting hard",
    "random": "train_oswft.py --num_rollouts 2 --weighting random",
    "dft": "train_sft.py --objective dft",
}
MAIN = ("sft", "oswft", "static", "grpo")
OTHERS = tuple(name for name in METHODS if name not in MAIN)
STEPS = (24, 48, 72, 144)  # checkpoints that are scored
EPOCH = 32  # steps, of 128 queries each
DEMO = (3e-4, 24)  # learning rate and steps of the demo
GRID = {5e-5: 144, 1e-4: 144, 3e-4: 72, 1e-3: 24}  # learning rate -> steps, with all before
GRPO_GRID = {5e-5: 48, 1e-4: 48, 3e-4: 48, 1e-3: 48, 3e-3: 24}
RESULTS = Path(__file__).parent.parent / "docs" / "study" / "results.json"
LENGTHS = "--max_length 160 --max_completion_length 128 --precision fp32"
NUM_HELDOUT = 48  # problems of each tier
SCORES = {  # name -> tiers, and what is averaged over them
    "gain": (GAIN, "pass@1"),
    "retention": (RETENTION, "pass@1"),
    "pass@8": (GAIN, "pass@8"),
    **{tier: ((tier,), "pass@1") for tier in TIERS},
}
SETTINGS = {  # what may not change while a study grows
    "worlds": WORLDS,
    "bases": {name: str(base) for name, base in BASES.items()},
    "tiers": TIERS,
    "train_mix": TRAIN_MIX,
    "methods": METHODS,
    "lengths": LENGTHS,
    "samples": [NUM_HELDOUT, NUM_SAMPLES, OFFLINE_SAMPLES],
}


@dataclass(frozen=True)
class Job:
    """One training run, or with method "base" the making of its base."""

    world: str
    method: str
    rate: float
    steps: int
    seed: int

    @property
    def name(self) -> str:
        if self.method == "base":
            return f"base-{WORLDS[self.world][0]}-{self.seed}"
        return f"{self.world}-{self.method}-{self.rate:g}-{self.steps}-{self.seed}"

    @property
    def base(self) -> "Job":
        return replace(self, method="base", rate=0.0, steps=0)

    def command(self, root: Path) -> str:
        """As one would type it; a script's first word is then `deepspeed`."""
        folder, base = shlex.quote(str(root / self.name)), shlex.quote(str(root / self.base.name))
        kind, data = WORLDS[self.world]
        if self.method == "base":
            return (
                f"python -m demo.tiny make --output_dir {folder} --base {kind} --seed {self.seed} "
                f"--num_heldout {NUM_HELDOUT}"
            )
        workers = "" if METHODS[self.method].startswith("train_sft") else " --verifier_workers 1"
        return (
            f"deepspeed {METHODS[self.method]} --model {base}/model --data {base}/{data}.jsonl "
            f"--output_dir {folder} --learning_rate {self.rate:g} --max_steps {self.steps} "
            f"--save_every 24 --keep_checkpoints 6 --seed {self.seed} {LENGTHS}{workers}"
        )


def job_of(row: dict) -> Job:
    return Job(**{name: row[name] for name in Job.__annotations__})


# ------------------------------------------------------------------------------------------------
# Which runs


def grid(method: str) -> dict[float, int]:
    return GRPO_GRID if method == "grpo" else GRID


def sweep(world: str, methods: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    return [
        Job(world, method, rate, steps, seed)
        for seed in seeds
        for method in methods
        for rate, steps in grid(method).items()
    ]


def points(rows: Sequence[dict]) -> list[dict]:
    """Every scored checkpoint, flat: its run's settings, tokens, and scores in percent.

    `balance`, by which settings are chosen, is the mean of gain and retention. A base is in every
    world that starts from it.
    """
    found = []
    for row in rows:
        kind = WORLDS[row["world"]][0]
        same_base = [world for world in WORLDS if WORLDS[world][0] == kind]
        for checkpoint in row["checkpoints"]:
            means = {
                name: 100 * sum(checkpoint["tiers"][tier][score] for tier in tiers) / len(tiers)
                for name, (tiers, score) in SCORES.items()
            }
            means["balance"] = (means["gain"] + means["retention"]) / 2
            for world in same_base if row["method"] == "base" else [row["world"]]:
                found.append({**row, **checkpoint, **means, "world": world})
    return found


def choose(
    rows: Sequence[dict], world: str, method: str, limit: str = "", most: float = 0.0
) -> tuple[float, int] | None:
    """The learning rate and the steps of the best balance, on the choosing seeds alone.

    Args:
        limit: "steps", "flops" or "trained_tokens", of which no more than `most` may be spent.
    """
    balances: dict[tuple[float, int], list[float]] = {}
    for point in points(rows):
        if (point["world"], point["method"]) == (world, method) and (
            point["seed"] in CHOOSING_SEEDS and (not limit or point[limit] <= most)
        ):
            balances.setdefault((point["rate"], point["steps"]), []).append(point["balance"])
    complete = max(map(len, balances.values()), default=0)
    means = {key: sum(own) / len(own) for key, own in balances.items() if len(own) == complete}
    return max(means, key=means.get, default=None)


def settings_of(rows: Sequence[dict], world: str, method: str) -> dict[str, tuple[float, int]]:
    """A method's settings in the report, by what they are for.

    Its own best ones and OSW-FT's. For the main methods, the best within one epoch, as the paper
    trains, and those of the demo, whose rate is higher. For SFT, the best that spend no more than
    OSW-FT's on trained tokens, or on all.
    """
    found = {"best": choose(rows, world, method), "same": choose(rows, world, "oswft")}
    if method == "grpo":
        rate, steps = found["best"]
        return {"best": (rate, steps), "tenfold": (float(f"{10 * rate:g}"), steps)}
    if method in MAIN:
        found |= {"epoch": choose(rows, world, method, "steps", EPOCH), "demo": DEMO}
    if method == "sft":
        spent = [
            point
            for point in points(rows)
            if (point["world"], point["method"]) == (world, "oswft")
            and point["seed"] in CHOOSING_SEEDS
            and (point["rate"], point["steps"]) == found["same"]
        ]
        for limit in ("trained_tokens", "flops"):
            most = 1.05 * sum(point[limit] for point in spent) / len(spent)
            found[limit] = choose(rows, world, method, limit, most)
    return {purpose: setting for purpose, setting in found.items() if setting}


def reported(
    rows: Sequence[dict], world: str, methods: Sequence[str], seeds: Sequence[int]
) -> list[Job]:
    """The runs at the settings of the report: one for each learning rate, to the most steps."""
    jobs = []
    for method in methods:
        longest: dict[float, int] = {}
        for rate, steps in settings_of(rows, world, method).values():
            longest[rate] = max(steps, longest.get(rate, 0))
        jobs += [
            Job(world, method, rate, steps, seed)
            for seed in seeds
            for rate, steps in longest.items()
        ]
    return jobs


def all_settings(rows: Sequence[dict]) -> dict[str, dict[str, dict]]:
    """World -> method -> purpose -> (learning rate, steps), as far as the sweeps are done."""
    tried = {(row["world"], row["method"]) for row in rows if row["seed"] in CHOOSING_SEEDS}
    return {
        world: {
            method: settings_of(rows, world, method)
            for method in METHODS
            if {(world, method), (world, "oswft")} <= tried
        }
        for world in WORLDS
    }


# The study in order; each entry plans its runs from the rows that are there by then.
FULL: tuple[Callable[[Sequence[dict]], list[Job]], ...] = (
    lambda rows: sweep("style", MAIN, CHOOSING_SEEDS),
    lambda rows: reported(rows, "style", MAIN, SEEDS),
    lambda rows: sweep("own", MAIN, CHOOSING_SEEDS[:1]),
    lambda rows: reported(rows, "own", MAIN, SEEDS[:4]),
    lambda rows: sweep("style", OTHERS, CHOOSING_SEEDS[:1]),
    lambda rows: reported(rows, "style", OTHERS, SEEDS[:4]),
    lambda rows: sweep("weak", MAIN, CHOOSING_SEEDS[:1]),
    lambda rows: reported(rows, "weak", MAIN, SEEDS[:4]),
)


# ------------------------------------------------------------------------------------------------
# One run, in processes of its own

PRELOADED = ["train_sft", "train_oswft", "train_grpo", "vllm", "demo.score"]


def in_process(function: Callable, log: Path, *args) -> None:
    """Run a function in a fresh process that has torch, vLLM and DeepSpeed imported already.

    What it prints goes to `log`. Raises ChildProcessError with the log's last line if it fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_logged, args=(function, log, *args))
    process.start()
    process.join()
    if process.exitcode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise ChildProcessError(f"{log}: status {process.exitcode}: {' '.join(last)}")


def _logged(function: Callable, log: Path, *args) -> None:
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    function(*args)


def run_command(command: str) -> None:
    """Run a command as its only rank, without the launcher or Python's imports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program, *sys.argv = shlex.split(command)
    if program == "deepspeed":
        runpy.run_path(str(Path(__file__).parent.parent / sys.argv[0]), run_name="__main__")
    else:
        sys.argv = sys.argv[1:]  # without -m
        runpy.run_module(sys.argv[0], run_name="__main__")


def run_job(job: Job, root: Path, offline_pass: bool = True) -> dict:
    """Do a run and score its checkpoints; returns its row. With a base comes its offline pass."""
    folder, command, started = root / job.name, job.command(root), time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)  # half a run: its process was killed
    folder.mkdir(parents=True)
    log = root / "logs" / f"{job.name}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"$ {command}\n")
    in_process(run_command, log, command)
    base, models = root / job.base.name, {0: folder / "model"}
    if job.method != "base":
        scored = {*(step for step in STEPS if step < job.steps), job.steps}
        models = {step: folder / f"checkpoint-{step:06d}" for step in sorted(scored)}
    in_process(score, log, base, models, job.seed, folder / "scores.json")
    if job.method == "base" and offline_pass:
        files = sorted({f"{data}.jsonl" for _, data in WORLDS.values()})
        in_process(offline_weights, log, base, files, job.seed, folder / "offline.json")
    row = {**asdict(job), "command": command, **provenance(), "machine": machine()}
    row["seconds"] = round(time.perf_counter() - started)
    scores = json.loads((folder / "scores.json").read_text())
    row["parameters"] = scores.pop("parameters")
    spent = tokens(folder)
    if job.method == "static":
        offline = json.loads((base / "offline.json").read_text())["sampled_tokens"]
        spent = {step: (trained, offline) for step, (trained, _) in spent.items()}
    row["checkpoints"] = []
    for step in models:
        trained, sampled = spent[step]
        flops = row["parameters"] * (6 * trained + 2 * sampled)
        row["checkpoints"].append(
            {
                "steps": step,
                "trained_tokens": trained,
                "sampled_tokens": sampled,
                "flops": flops,
                "tiers": scores[str(step)],
            }
        )
    if (folder / "rollouts").exists() and job.method != "grpo":
        row["weights"] = weights_by_tier(folder)
    return row


def tokens(folder: Path) -> dict[int, tuple[int, int]]:
    """Tokens that were trained on, and sampled, up to each step."""
    trained = sampled = 0
    spent = {0: (0, 0)}
    metrics = folder / "metrics.jsonl"
    for _, row in read_rows(str(metrics)) if metrics.exists() else ():
        trained += row["train_tokens"]
        sampled += row.get("rollout_tokens", 0)
        spent[row["step"]] = trained, sampled
    return spent


def weights_by_tier(folder: Path) -> dict[str, list[float]]:
    """The mean weight of each trained tier, at each step."""
    means: dict[str, list[float]] = {tier: [] for tier in TRAIN_MIX}
    for path in sorted((folder / "rollouts").iterdir()):
        rows = [row for _, row in read_rows(str(path))]
        for tier, steps in means.items():
            own = [row["weight"] for row in rows if row["id"].startswith(f"{tier}-")]
            steps.append(round(sum(own) / len(own), 4))
    return means


def machine() -> str:
    """The kind of machine; rows of different kinds are not mixed."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return f"{model or platform.processor()}, {os.cpu_count()} cores, {platform.machine()}"


# ------------------------------------------------------------------------------------------------
# The study


class Study:
    """A folder with the rows that are done; it grows, row by row."""

    def __init__(self, root: Path, workers: int):
        self.root, self.workers, self.path = root, workers, root / "rows.jsonl"
        settings = json.loads(json.dumps(SETTINGS))
        before = read_args(root).get("settings")
        if before is None and root.is_dir() and any(root.iterdir()):
            raise InputError(f"{root} holds something else: choose another --output_dir")
        if changed := differences(before or settings, settings):
            raise InputError(f"{root} holds a study with other settings: {'; '.join(changed)}")
        write_args(root, settings=settings)
        self.rows = self.read() if self.path.exists() else []
        others = {row["machine"] for row in self.rows} - {machine()}
        if others:
            raise InputError(f"{root} holds rows of another machine ({', '.join(others)})")

    def read(self) -> list[dict]:
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a kill left half a row: its run is done again
            self.path.write_bytes(b"".join(lines[:-1]))
        return [row for _, row in read_rows(str(self.path))]

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """The runs without a row; first the bases that have none, or whose folder is gone."""
        done = {job_of(row).name for row in self.rows}
        runs = [job for job in jobs if job.name not in done]
        bases = {job.base.name: job.base for job in jobs if job.base.name not in done}
        bases |= {
            job.base.name: job.base for job in runs if not (self.root / job.base.name).is_dir()
        }
        return [*bases.values(), *runs]

    def run(self, jobs: Sequence[Job], what: str) -> None:
        """Do the runs that are missing, `workers` at a time; each appends its row.

        Raises ChildProcessError if one fails, after those beside it have ended.
        """
        missing = self.missing(jobs)
        print(f"{what}: {len(jobs)} runs, missing with bases: {len(missing)}", flush=True)
        bases = [job for job in missing if job.method == "base"]
        runs = [job for job in missing if job.method != "base"]
        runs.sort(key=lambda job: (job.seed, job.method != "grpo", -job.steps))  # the longest first
        for group in filter(None, (bases, runs)):
            bar = tqdm(total=len(group), desc=what, unit="run")
            with bar, ThreadPoolExecutor(self.workers) as pool:
                self.collect([pool.submit(run_job, job, self.root) for job in group], bar)

    def collect(self, futures: Sequence[Future], bar: tqdm) -> None:
        failed = None
        try:
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if future.exception():
                    failed = future.exception()
                    for other in futures:
                        other.cancel()
                else:
                    self.append(future.result())
                    bar.update(1)
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        if failed:
            raise failed

    def append(self, row: dict) -> None:
        self.rows.append(row)
        with self.path.open("a") as out:
            out.write(json.dumps(row) + "\n")
        job = job_of(row)
        if job.method != "base":
            shutil.rmtree(self.root / job.name)  # gigabytes, of all runs; the log stays


def write_results(rows: Sequence[dict], settings: dict, path: Path) -> None:
    """Write results.json, a line for each run."""
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    with atomic_write(path) as partial:
        partial.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{lines}\n]}}\n')


def short(settings: dict) -> list[Job]:
    """Four methods at their best settings, on four seeds, in the two worlds of the picture."""
    return [
        Job(world, method, *settings[world][method]["best"], seed)
        for world in ("style", "own")
        for seed in SEEDS[:4]
        for method in MAIN
    ]


def study(output_dir: Path = Path("runs/study"), full: bool = False, workers: int = 2) -> None:
    """Train and score all runs that are missing, then write results.json, tables and pictures.

    Args:
        output_dir: a study that was stopped there goes on.
        full: choose settings, and do all that docs/study.md reports. Otherwise four methods with
            the settings of docs/study/results.json, on four seeds.
        workers: runs side by side, one core each.
    """
    from demo.report import report

    if workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    study = Study(output_dir, workers)
    if full:
        for number, plan in enumerate(FULL, start=1):
            study.run(plan(study.rows), f"part {number} of {len(FULL)}")
        settings = all_settings(study.rows)
    else:
        settings = json.loads(RESULTS.read_text())["settings"]
        study.run(short(settings), "study")
    write_results(study.rows, settings, output_dir / "results.json")
    report(output_dir / "results.json", output_dir / "report.md")


if __name__ == "__main__":
    try:
        tyro.cli(study, description=__doc__, use_underscores=True)
    except (InputError, ChildProcessError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on")
