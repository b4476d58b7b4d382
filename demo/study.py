"""The study: SFT, OSW-FT and their rivals in a small world, each at its best settings, over seeds.

    python -m demo.study             # what `make study` runs: half an hour on two cores
    python -m demo.study --full      # all of it: hours; after a stop, give the same command again
    python -m demo.report            # docs/study.md and its pictures, from docs/study/results.json

Each run is one of the repository's own scripts, with real vLLM and DeepSpeed, in a process of its
own on one core. Its checkpoints are scored on the six tiers of demo/world.py. A method's settings
are those that score best on CHOOSING_SEEDS; what is reported comes from SEEDS.
"""

import fcntl
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import runpy
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro
from tqdm import tqdm

from data import InputError, atomic_write, read_rows
from demo.score import (
    MAX_COMPLETION_LENGTH,
    MAX_LENGTH,
    NUM_SAMPLES,
    OFFLINE_SAMPLES,
    offline_weights,
    score,
)
from demo.world import BASES, GAIN, NUM_HELDOUT, RETENTION, TIERS, TRAIN_MIX
from run import provenance, read_args, write_args

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
    "hard": "train_oswft.py --num_rollouts 4 --weighting hard",
    "random": "train_oswft.py --num_rollouts 4 --weighting random",
    "dft": "train_sft.py --objective dft",
}
SUPERVISED = ("sft", "oswft", "static")
MAIN = (*SUPERVISED, "grpo")
OTHERS = tuple(name for name in METHODS if name not in MAIN)
STEPS = (24, 48, 72, 144, 288)  # checkpoints that are scored, multiples of the first
EPOCH = 32  # steps, of 128 queries each
DEMO = (3e-4, 24)  # learning rate and steps of the demo
GRID = {5e-5: 144, 1e-4: 144, 3e-4: 72, 1e-3: 24}  # learning rate -> steps, with all before
LONG = (5e-5, 288)  # a low rate for longer: with it SFT is OSW-FT's strongest rival
SFT_GRID = {**GRID, LONG[0]: LONG[1]}
GRPO_GRID = {5e-5: 48, 1e-4: 48, 3e-4: 48, 1e-3: 48, 3e-3: 24}
RESULTS = Path(__file__).parent.parent / "docs" / "study" / "results.json"
SCORES = {  # name -> tiers, and what is averaged over them
    "gain": (GAIN, "pass@1"),
    "retention": (RETENTION, "pass@1"),
    "pass@8": (GAIN, "pass@8"),
    "expert's style": (RETENTION, "scratch"),
    "KL": (RETENTION, "kl"),
    **{tier: ((tier,), "pass@1") for tier in TIERS},
}
BATCH, NUM_TRAIN, PROMPT_TOKENS = 128, 4096, 17  # queries, problems, and tokens of a prompt


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
            f"--save_every {STEPS[0]} --keep_checkpoints {-(-self.steps // STEPS[0])} "
            f"--seed {self.seed} --max_length {MAX_LENGTH} "
            f"--max_completion_length {MAX_COMPLETION_LENGTH} --precision fp32{workers}"
        )


def job_of(row: dict) -> Job:
    return Job(**{name: row[name] for name in Job.__annotations__})


SETTINGS = {  # what may not change while a study grows
    "bases": {name: str(base) for name, base in BASES.items()},
    "worlds": WORLDS,
    "tiers": TIERS,
    "train_mix": TRAIN_MIX,
    "samples": [NUM_SAMPLES, OFFLINE_SAMPLES],
    **{name: Job("style", name, 1e-4, 144, 0).command(Path()) for name in ("base", *METHODS)},
}


# ------------------------------------------------------------------------------------------------
# Which runs


def grid(method: str) -> dict[float, int]:
    return {"grpo": GRPO_GRID, "sft": SFT_GRID}.get(method, GRID)


def sweep(world: str, methods: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    return [
        Job(world, method, rate, steps, seed)
        for seed in seeds
        for method in methods
        for rate, steps in grid(method).items()
    ]


def points(rows: Sequence[dict]) -> list[dict]:
    """Every scored checkpoint, flat: its run's settings, its costs, scores in percent, KL in nats.

    `balance`, by which settings are chosen, is the mean of gain and retention. A base, and GRPO,
    which reads no solution, is in every world that starts from it. Of two runs at one learning
    rate, one goes through the other's steps.
    """
    found = {}
    for row in rows:
        base = WORLDS[row["world"]][0]
        same_base = [world for world in WORLDS if WORLDS[world][0] == base]
        for checkpoint in row["checkpoints"]:
            means = {
                name: sum(checkpoint["tiers"][tier][score] for tier in tiers)
                * (1 if score == "kl" else 100)
                / len(tiers)
                for name, (tiers, score) in SCORES.items()
            }
            means["balance"] = (means["gain"] + means["retention"]) / 2
            means["TFLOPs"] = count_flops(row, checkpoint) / 1e12
            for world in same_base if row["method"] in ("base", "grpo") else [row["world"]]:
                point = {**row, **checkpoint, **means, "world": world}
                found[world, row["method"], row["rate"], point["steps"], row["seed"]] = point
    return list(found.values())


def count_flops(row: dict, checkpoint: dict) -> float:
    """6 for each parameter and trained token, 2 for each that is sampled, or read to sample.

    Prompts count in both: vLLM reads them anew for each answer, as they are shorter than a block.
    """
    command = METHODS.get(row["method"], "")
    answers = int((re.findall(r"num_rollouts (\d)", command) or [0])[0])
    prompts = answers * BATCH * checkpoint["steps"]
    if row["method"] == "static":
        prompts = OFFLINE_SAMPLES * NUM_TRAIN
    read = checkpoint["sampled_tokens"] + prompts * PROMPT_TOKENS
    return row["parameters"] * (6 * checkpoint["trained_tokens"] + 2 * read)


def curves(
    found: Sequence[dict], world: str, method: str, seeds: Sequence[int]
) -> dict[float, dict[int, list[dict]]]:
    """Learning rate -> seed -> the method's checkpoints in order, from the base on."""
    bases = {p["seed"]: p for p in found if (p["world"], p["method"]) == (world, "base")}
    rates: dict[float, dict[int, list[dict]]] = {}
    for point in sorted(found, key=lambda point: point["steps"]):
        if (point["world"], point["method"]) == (world, method) and point["seed"] in seeds:
            curve = rates.setdefault(point["rate"], {}).setdefault(
                point["seed"], [bases[point["seed"]]]
            )
            curve.append(point)
    return rates


def along(curve: Sequence[dict], key: str, value: float) -> dict | None:
    """A curve's scores where `key` has a value, between its checkpoints; None if it ends before."""
    for before, after in itertools.pairwise(curve):
        if before[key] <= value <= after[key]:
            share = (value - before[key]) / ((after[key] - before[key]) or 1)
            costs = ("TFLOPs", "trained_tokens", "sampled_tokens", "steps")
            names = (*SCORES, "balance", *costs)
            return {name: before[name] + share * (after[name] - before[name]) for name in names}
    return None


def sweep_curves(
    found: Sequence[dict], world: str, method: str
) -> dict[float, dict[int, list[dict]]]:
    """The curves from which settings are chosen: of choosing seeds whose sweep is complete."""
    rates = curves(found, world, method, CHOOSING_SEEDS)
    complete = [
        seed
        for seed in CHOOSING_SEEDS
        if all(
            rates.get(rate, {}).get(seed, [{"steps": 0}])[-1]["steps"] >= steps
            for rate, steps in grid(method).items()
        )
    ]
    return {rate: {seed: rates[rate][seed] for seed in complete} for rate in grid(method)}


def mean_balances(found: Sequence[dict], world: str, method: str) -> dict[tuple, float]:
    """(learning rate, steps) -> mean balance, over the choosing seeds alone."""
    balances: dict[tuple[float, int], list[float]] = {}
    for rate, by_seed in sweep_curves(found, world, method).items():
        for point in itertools.chain.from_iterable(curve[1:] for curve in by_seed.values()):
            balances.setdefault((rate, point["steps"]), []).append(point["balance"])
    return {setting: sum(own) / len(own) for setting, own in balances.items()}


def choose_rate(found: Sequence[dict], world: str, method: str, key: str, best: tuple) -> float:
    """The learning rate at which a curve is best where its `key` equals OSW-FT's at its best.

    On the choosing seeds alone; a rate whose curve ends before that is left out.
    """
    ours = sweep_curves(found, world, "oswft")[best[0]]
    targets = {seed: p[key] for seed, curve in ours.items() for p in curve if p["steps"] == best[1]}
    means = {}
    for rate, by_seed in sweep_curves(found, world, method).items():
        reached = [along(by_seed[seed], key, targets[seed]) for seed in by_seed if seed in targets]
        if reached and all(reached):
            means[rate] = sum(point["balance"] for point in reached) / len(reached)
    return max(means, key=means.get, default=0.0)


def settings_of(found: Sequence[dict], world: str, method: str) -> dict[str, tuple[float, int]]:
    """The learning rate and steps at which a method is reported, by purpose; none before sweeps.

    best: of all that was tried, but LONG, if the sweep is done. same: OSW-FT's best. In the main
    world also: tenfold: GRPO's best, at ten times the learning rate. demo: the demo's. long: LONG.
    epoch: the best within one epoch, as the paper trains. trained_tokens, TFLOPs, gain: the rate
    that is best where a curve has spent, or gained, as much as OSW-FT.
    """
    balances, ours = (mean_balances(found, world, name) for name in (method, "oswft"))
    if not ours or not (balances or (world == "style" and method in OTHERS)):
        return {}
    balances.pop(LONG, None)
    best, oswft_best = (max(means, key=means.get, default=None) for means in (balances, ours))
    settings = {"best": best} if best else {}
    if method not in ("grpo", "oswft"):
        settings["same"] = oswft_best
    if world != "style":
        return settings
    if method == "grpo":
        settings["tenfold"] = (float(f"{10 * best[0]:g}"), best[1])
    if method in MAIN:
        settings["demo"] = DEMO
    if method in SUPERVISED:
        settings["long"] = LONG
    if method in ("sft", "oswft"):
        short = {setting: mean for setting, mean in balances.items() if setting[1] <= EPOCH}
        settings["epoch"] = max(short, key=short.get)
    if method == "sft":
        for key in ("trained_tokens", "TFLOPs", "gain"):
            rate = choose_rate(found, world, method, key, oswft_best)
            settings[key] = (rate, grid(method).get(rate, 0))
    return settings


def report_jobs(
    rows: Sequence[dict], world: str, methods: Sequence[str], seeds: Sequence[int]
) -> list[Job]:
    """The runs of the report: one for each learning rate, as long as any purpose needs."""
    jobs, found = [], points(rows)
    for method in methods:
        longest: dict[float, int] = {}
        for rate, steps in settings_of(found, world, method).values():
            longest[rate] = max(steps, longest.get(rate, 0))
        jobs += [
            Job(world, method, rate, steps, seed)
            for seed in seeds
            for rate, steps in longest.items()
            if steps
        ]
    return jobs


def all_settings(rows: Sequence[dict]) -> dict[str, dict[str, dict]]:
    """World -> method -> purpose -> (learning rate, steps), as far as the sweeps are done."""
    found = points(rows)
    return {
        world: {
            method: settings
            for method in METHODS
            if (settings := settings_of(found, world, method))
        }
        for world in WORLDS
    }


# The study in order; each entry plans its runs from the rows that are there by then.
PARTS: tuple[Callable[[Sequence[dict]], list[Job]], ...] = (
    lambda rows: sweep("style", MAIN, CHOOSING_SEEDS),
    lambda rows: report_jobs(rows, "style", MAIN, SEEDS),
    lambda rows: sweep("own", SUPERVISED, CHOOSING_SEEDS[:1]),  # GRPO's runs would be the same ones
    lambda rows: report_jobs(rows, "own", SUPERVISED, SEEDS[:4]),
    lambda rows: sweep("weak", MAIN[:2], CHOOSING_SEEDS[:1]),
    lambda rows: report_jobs(rows, "weak", MAIN[:2], SEEDS[:4]),
    lambda rows: report_jobs(rows, "style", OTHERS, SEEDS[:4]),  # at OSW-FT's settings
    lambda rows: sweep("style", OTHERS, CHOOSING_SEEDS[:1]),
    lambda rows: report_jobs(rows, "style", OTHERS, SEEDS[:4]),  # at their best
)


# ------------------------------------------------------------------------------------------------
# One run, in processes of its own

PRELOADED = ["train_sft", "train_oswft", "train_grpo", "vllm", "demo.score"]
_polling = threading.Lock()  # two threads that ask for a child's status at once lose it
_stopped = threading.Event()


def in_process(function: Callable, log: Path, *args) -> None:
    """Run a function in a fresh process that has torch, vLLM and DeepSpeed imported already.

    What it prints goes to `log`. Raises ChildProcessError with the log's last line if it fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_logged, args=(function, log, *args))
    with _polling:
        if _stopped.is_set():
            raise ChildProcessError(f"{log}: stopped")
        process.start()
    multiprocessing.connection.wait([process.sentinel])
    with _polling:
        process.join()
    if process.exitcode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise ChildProcessError(f"{log}: status {process.exitcode}: {' '.join(last)}")


def _logged(function: Callable, log: Path, *args) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    function(*args)


def _end_with_parent() -> None:
    """Else, after a kill, it would write into the folder of the run that takes its place."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_command(command: str) -> None:
    """Run a command in this process, without the launcher or Python's imports."""
    program, *sys.argv = shlex.split(command)
    if program == "deepspeed":
        runpy.run_path(str(Path(__file__).parent.parent / sys.argv[0]), run_name="__main__")
    else:
        sys.argv = sys.argv[1:]  # without -m
        runpy.run_module(sys.argv[0], run_name="__main__")


def run_job(job: Job, root: Path, offline_pass: bool = True) -> dict:
    """Do a run and score its checkpoints; returns its row. After a base comes its offline pass."""
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
    row = {**asdict(job), "command": command, "seconds": round(time.perf_counter() - started)}
    scores = json.loads((folder / "scores.json").read_text())
    row["parameters"] = scores.pop("parameters")
    spent = tokens(folder)
    if job.method == "static":
        offline = json.loads((base / "offline.json").read_text())["sampled_tokens"]
        spent = {step: (trained, offline) for step, (trained, _) in spent.items()}
    row["checkpoints"] = [
        {
            "steps": step,
            "trained_tokens": spent[step][0],
            "sampled_tokens": spent[step][1],
            "tiers": scores[str(step)],
        }
        for step in models
    ]
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
        if changed := [n for n in settings if before and before.get(n) != settings[n]]:
            raise InputError(f"{root} holds a study with other settings: {', '.join(changed)}")
        write_args(root, settings=settings)
        self.lock = (root / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{root}: another study is running in it") from None
        # of the code that is imported now, whatever is committed while it runs
        self.origin = {**provenance(), "machine": machine()}
        self.rows = {job_of(row).name: row for row in self.read()} if self.path.exists() else {}
        for key in ("machine", "versions"):
            others = [row[key] for row in self.rows.values() if row[key] != self.origin[key]]
            if others:
                raise InputError(f"{root} holds rows of other {key}: {others[0]}")

    def read(self) -> list[dict]:
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a kill left half a row: its run is done again
            os.truncate(self.path, sum(map(len, lines[:-1])))
        return [row for _, row in read_rows(str(self.path))]

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """The runs without a row; first the bases that have none, or whose folder is gone.

        A longer run at the same learning rate has a shorter one's checkpoints.
        """
        done = [job_of(row) for row in self.rows.values()]
        runs = [
            job
            for job in jobs
            if not any(
                replace(old, steps=job.steps) == job and old.steps >= job.steps for old in done
            )
        ]
        bases = {job.base.name: job.base for job in jobs if job.base.name not in self.rows}
        bases |= {
            job.base.name: job.base for job in runs if not (self.root / job.base.name).is_dir()
        }
        return [*bases.values(), *runs]

    def run(self, jobs: Sequence[Job], what: str) -> None:
        """Do the runs that are missing, `workers` at a time; each appends its row.

        Raises ChildProcessError if one fails, after the others that had begun have ended.
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
        except BaseException:  # Ctrl-C, or a row that cannot be written
            stop(futures)
            raise
        if failed:
            raise failed

    def append(self, row: dict) -> None:
        job = job_of(row)
        before = self.rows.get(job.name, row)  # a base whose folder was gone
        if row["checkpoints"] != before["checkpoints"]:
            raise InputError(f"{job.name} is not what it was: start again in another folder")
        self.rows[job.name] = {**row, **self.origin}
        with self.path.open("a") as out:
            out.write(json.dumps(self.rows[job.name]) + "\n")
            out.flush()
            os.fsync(out.fileno())
        if job.method != "base":
            shutil.rmtree(self.root / job.name)  # gigabytes, of all runs; the log stays


def stop(futures: Sequence[Future]) -> None:
    """End what runs, and begin nothing more."""
    _stopped.set()
    for future in futures:
        future.cancel()
    with _polling:
        for process in multiprocessing.active_children():
            process.terminate()


def write_results(rows: Iterable[dict], settings: dict, path: Path) -> None:
    """Write results.json, a line for each run."""
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    with atomic_write(path) as partial:
        partial.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{lines}\n]}}\n')


def short_jobs(settings: dict) -> list[Job]:
    """Four methods at their best settings, and two in the picture's other world, on four seeds."""
    return [
        Job(world, method, *settings[world][method]["best"], seed)
        for world, methods in (("style", MAIN), ("own", MAIN[:2]))
        for seed in SEEDS[:4]
        for method in methods
        if method in settings[world]
    ]


def study(output_dir: Path = Path("runs/study"), full: bool = False, workers: int = 2) -> None:
    """Train and score all runs that are missing, then write results.json, tables and pictures.

    Args:
        output_dir: a study that was stopped there is continued.
        full: choose settings, and do all that docs/study.md reports. Otherwise four methods with
            the settings of docs/study/results.json, on four seeds.
        workers: runs side by side, one core each.
    """
    from demo.report import report

    if workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    study, settings = Study(output_dir, workers), json.loads(RESULTS.read_text())["settings"]
    try:
        if full:
            for number, plan in enumerate(PARTS, start=1):
                study.run(plan([*study.rows.values()]), f"part {number} of {len(PARTS)}")
        else:
            study.run(short_jobs(settings), "study")
    finally:  # also of a part
        rows = [*study.rows.values()]
        write_results(rows, all_settings(rows) if full else settings, output_dir / "results.json")
        (output_dir / "report.md").unlink(missing_ok=True)
        report(output_dir / "results.json", output_dir / "report.md")


if __name__ == "__main__":
    try:
        tyro.cli(study, description=__doc__, use_underscores=True)
    except (InputError, ChildProcessError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; to continue, give the same command again")
