"""How the model learns: DeepSpeed engine, per-token log-probabilities, optimizer step, checkpoints.

This is the only file that imports deepspeed. A training script asks for one optimizer step with

    engine.update(rows, loss_fn, max_tokens)

and the gradient is that of the sum of `loss_fn` over all rows, for any number of ranks and any
split into micro-batches, because `loss_fn` divides by the normalizer of the whole global batch.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
import tyro
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from data import (
    InputError,
    MicroBatch,
    TokenizedExample,
    collate,
    split_micro_batches,
    stop_token_ids,
    write_rows,
)

LOGIT_CHUNK = 2**26  # logits held at once: 256 MiB in fp32, whatever the vocabulary
GATHER_BYTES = 2**30  # parameters gathered at once under ZeRO-3
NORM_CHUNK = 2**24  # optimizer state looked at at once for its norms
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
EMPTY = ([0], [0])  # prompt and completion of the row that stands in where there is none


# ------------------------------------------------------------------------------------------------
# Per-token log-probabilities


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T)[target], a chunk of tokens at a time, recomputed in backward.

    A (tokens x vocabulary) tensor never exists: for 4,096 tokens of Qwen3 it would take 2.5 GB in
    fp32, three times over. One autograd node, so under ZeRO-3 the head is one module call.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets):  # (N, H), (V, H), (N,) -> (N,) fp32
        rows = max(1, LOGIT_CHUNK // weight.shape[0])
        log_normalizers = hidden.new_empty(len(hidden), dtype=torch.float32)
        logprobs = torch.empty_like(log_normalizers)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = (hidden[chunk] @ weight.T).float()  # (rows, V)
            log_normalizers[chunk] = logits.logsumexp(-1)
            logprobs[chunk] = logits.gather(-1, targets[chunk, None])[:, 0]
        ctx.rows = rows
        ctx.save_for_backward(hidden, weight, targets, log_normalizers)
        return logprobs - log_normalizers

    @staticmethod
    def backward(ctx, grad):  # (N,)
        hidden, weight, targets, log_normalizers = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            # d logprob / d logits = onehot(target) - softmax(logits)
            grad_logits = (hidden[chunk] @ weight.T).float()  # (rows, V)
            grad_logits.sub_(log_normalizers[chunk, None]).exp_().mul_(-grad[chunk, None])
            grad_logits.scatter_add_(-1, targets[chunk, None], grad[chunk, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.T, hidden[chunk])
        return grad_hidden, grad_weight, None


class LogprobHead(torch.nn.Module):
    """Stands in for `lm_head`: hidden states and targets in, log-probabilities out."""

    def __init__(self, weight: torch.nn.Parameter):
        super().__init__()
        self.weight = weight  # the same Parameter, so tied embeddings stay tied

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ChunkedLogprobs.apply(hidden, self.weight, targets)


class LogprobModel(torch.nn.Module):
    """A causal language model that returns the log-probabilities of given tokens, not logits."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        model.set_output_embeddings(LogprobHead(model.get_output_embeddings().weight))
        self.model = model

    def forward(self, input_ids, targets, positions):  # (B, T), (N,), (N,) -> (N,)
        # No attention mask: rows are padded on the right, and causal attention never looks there.
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return head(hidden.flatten(0, 1).index_select(0, positions), targets)


# ------------------------------------------------------------------------------------------------
# The engine


def parse_args(args_class: type, description: str):
    """Read a script's dataclass from the command line; of several ranks only the first speaks."""
    return tyro.cli(
        args_class,
        args=[arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")],  # the launcher's
        description=description,
        use_underscores=True,
        console_outputs=int(os.environ.get("RANK", 0)) == 0,
    )


def init_distributed() -> tuple[int, int]:
    """Join the process group that the deepspeed launcher prepared; returns (rank, world size)."""
    if "RANK" not in os.environ:
        raise InputError(f"start this script with: deepspeed {os.path.basename(sys.argv[0])} ...")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about DeepSpeed's calls
    transformers.utils.logging.disable_progress_bar()
    deepspeed.utils.logging.set_log_level_from_string("error")
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    # Share the cores; once vLLM has started, torch keeps to this variable, else to one thread.
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_SIZE", 1)))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed(verbose=False)
    return dist.get_rank(), dist.get_world_size()


def exit_with(error: Exception) -> None:
    """End with one line and status 1; of several ranks with the same error only one speaks."""
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)  # if rank 0 has spoken, the launcher ends us meanwhile
    where = f" on rank {rank}" if rank > 0 else ""
    print(f"error{where}: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # at once: the other ranks may be waiting for this one in a collective


def gather(items: list) -> list:
    """Every rank's list, one after the other, on every rank. A collective."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


class Stopwatch:
    """Seconds by phase."""

    def __init__(self):
        self.last, self.seconds = time.perf_counter(), {}

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def read(self) -> dict[str, float]:
        """What was booked since the last reading."""
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return seconds


def load_model(path_or_hub_id: str, max_length: int) -> PreTrainedModel:
    """Load a causal language model. Raises InputError if it is absent or made for shorter text."""
    try:
        config = AutoConfig.from_pretrained(path_or_hub_id)
        if max_length > config.max_position_embeddings:
            raise InputError(
                f"--max_length {max_length} is beyond the model's limit of "
                f"{config.max_position_embeddings} tokens"
            )
        return AutoModelForCausalLM.from_pretrained(path_or_hub_id, config=config)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path_or_hub_id}: cannot load a model from there: {reason}") from error


class Engine:
    """A DeepSpeed engine around a causal language model: AdamW, constant learning rate, ZeRO.

    Args:
        model: the model to train, in full.
        precision: "bf16" (with fp32 master weights) or "fp32".
        zero_stage: 0 to 3, what is sharded over ranks: nothing, optimizer state, + gradients,
            + parameters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learning_rate: float,
        max_grad_norm: float,
        precision: str = "bf16",
        zero_stage: int = 3,
        gradient_checkpointing: bool = False,
        cpu_offload: bool = False,
    ):
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        bf16 = precision == "bf16"
        for parameter in model.parameters():  # model.to() would round the rotary frequencies too
            parameter.data = parameter.data.to(torch.bfloat16 if bf16 else torch.float32)
        model = LogprobModel(model).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0.0
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,  # nominal: passes are counted by `last=`
            "bf16": {"enabled": bf16},
            "gradient_clipping": max_grad_norm,
            "zero_optimization": {"stage": zero_stage},
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler at run time
            "steps_per_print": 10**9,
        }
        if bf16 and zero_stage > 0:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if cpu_offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.device = self.engine.device
        self.zero_stage = zero_stage
        self.adam = optimizer

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.module.model

    def update(
        self,
        rows: Sequence[TokenizedExample],
        loss_fn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        max_tokens: int,
    ) -> dict[str, float]:
        """One optimizer step on the sum of `loss_fn` over `rows`, the same on every rank.

        Args:
            rows: the sequences that have a gradient; leave out those that have none. With no row
                at all Adam steps from its momentum alone, as it does on a gradient of zero.
            loss_fn: logprobs (B, T), mask (B, T), indices (B,) into rows -> scalar, divided by the
                normalizer of the *global* batch.
            max_tokens: in one forward pass of one rank, padding included.

        Returns:
            loss, grad_norm, clipped, update_norm_ratio, learning_rate.

        Raises FloatingPointError, with the step and the rows, if loss or gradient is not finite.
        """
        passes = split_micro_batches([len(row) for row in rows], dist.get_world_size(), max_tokens)
        passes = passes or [[[]] * dist.get_world_size()]
        total_loss, row_logprobs = torch.zeros((), device=self.device), []
        for number, shares in enumerate(passes, start=1):
            mine = shares[dist.get_rank()]
            # Every pass is a collective: a rank without a row takes part with one that weighs 0.
            batch = collate([(rows[i].prompt_ids, rows[i].completion_ids) for i in mine] or [EMPTY])
            logprobs = self.logprobs(batch)
            if mine:
                indices = torch.tensor(mine, device=self.device)
                loss = loss_fn(logprobs, batch.mask.to(self.device), indices)
            else:
                loss = 0 * logprobs.sum()
            self.engine.set_gradient_accumulation_boundary(number == len(passes))
            # DeepSpeed averages over ranks; ours is a sum, divided by the normalizer already.
            self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
            total_loss += loss.detach()
            row_logprobs.append((mine, logprobs.detach().sum(dim=1)))

        dist.all_reduce(total_loss)
        step = self.engine.global_steps + 1
        if not total_loss.isfinite():
            bad = [
                rows[i].example.id
                for mine, sums in row_logprobs
                for i, finite in zip(mine, sums.isfinite().tolist(), strict=False)
                if not finite
            ]
            raise FloatingPointError(f"step {step}: loss is {total_loss}, rows {gather(bad)}")
        stats = {"loss": total_loss.item(), **self.step()}
        if not math.isfinite(stats["grad_norm"]):
            ids = [row.example.id for row in rows]
            raise FloatingPointError(f"step {step}: gradient is {stats['grad_norm']}, rows {ids}")
        return stats

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """log pi(target) for every completion token: (B, T) fp32, zero outside `batch.mask`."""
        positions = batch.mask.flatten().nonzero()[:, 0]  # on the CPU: no synchronisation
        targets = batch.targets.flatten()[positions].to(self.device, non_blocking=True)
        positions = positions.to(self.device, non_blocking=True)
        input_ids = batch.input_ids.to(self.device, non_blocking=True)
        logprobs = self.engine(input_ids, targets, positions)
        padded = logprobs.new_zeros(batch.mask.numel()).index_copy(0, positions, logprobs)
        return padded.view(batch.mask.shape)

    def step(self) -> dict[str, float]:
        """Clip, update, and say how large gradient and update were."""
        if self.zero_stage == 0 and not self.engine.bfloat16_enabled():  # DeepSpeed keeps no norm
            grads = [p.grad for p in self.engine.module.parameters()]
            grad_norm = float(torch.nn.utils.get_total_norm(grads))
            self.engine.step()
        else:
            self.engine.step()
            grad_norm = float(self.engine.get_global_grad_norm())
        return {
            "grad_norm": grad_norm,
            "clipped": grad_norm > self.max_grad_norm,
            "update_norm_ratio": self._update_norm_ratio(),
            "learning_rate": self.learning_rate,
        }

    @torch.no_grad()
    def _update_norm_ratio(self) -> float:
        """|update| / |parameters| of the step just taken, from Adam's state: no copy is kept."""
        squares = torch.zeros(2, device=self.device, dtype=torch.float64)
        for parameter, state in self.adam.state.items():
            correction = [1 - beta ** float(state["step"]) for beta in ADAM_BETAS]
            flat = [x.flatten() for x in (parameter, state["exp_avg"], state["exp_avg_sq"])]
            for weights, mean, variance in zip(*(x.split(NORM_CHUNK) for x in flat), strict=True):
                update = mean / correction[0] / ((variance / correction[1]).sqrt() + ADAM_EPS)
                squares[0] += (self.learning_rate * update.norm()).to(self.device).double() ** 2
                squares[1] += weights.norm().to(self.device).double() ** 2
        dist.all_reduce(squares)  # shards add up; without sharding both scale alike
        return float((squares[0] / squares[1]).sqrt())

    def named_weights(self, gather_bytes: int = GATHER_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter in full under its Hugging Face name; tied ones once.

        A collective: all ranks have to run the iterator to its end. Under ZeRO-3 about
        `gather_bytes` are gathered at a time, and what is yielded is a copy, which lives on.
        """
        bucket, size = [], 0
        for name, parameter in self.model.named_parameters():
            numel = getattr(parameter, "ds_numel", parameter.numel())  # numel() of a shard is 0
            if bucket and size + numel * parameter.element_size() > gather_bytes:
                yield from self._gather(bucket)
                bucket, size = [], 0
            bucket.append((name, parameter))
            size += numel * parameter.element_size()
        yield from self._gather(bucket)

    def _gather(self, bucket) -> Iterator[tuple[str, torch.Tensor]]:
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            for name, parameter in bucket:
                yield name, parameter.detach().clone()

    def save_model(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a plain Hugging Face folder that stops at the end of turn. A collective."""
        weights = {}
        for name, tensor in self.named_weights():
            if dist.get_rank() == 0:
                weights[name] = tensor.cpu()
        if dist.get_rank() == 0:
            self.model.generation_config.eos_token_id = stop_token_ids(tokenizer)
            self.model.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
        dist.barrier()

    def save_state(self, folder: Path) -> None:
        """Write all that this engine needs to go on exactly: a shard per rank. A collective."""
        self.engine.save_checkpoint(str(folder), tag="state", save_latest=False)

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote with the same number of ranks. A collective."""
        loaded, _ = self.engine.load_checkpoint(str(folder), tag="state")
        if loaded is None:
            raise InputError(f"{folder}: not a complete checkpoint")


# ------------------------------------------------------------------------------------------------
# The run folder


class Run:
    """What a run leaves in its output folder, and whether it has been asked to stop.

    Args:
        output_dir: on a file system that all hosts share.
        args: every argument, as plain values; a resumed run must have the same ones.
        resume: go on from the newest checkpoint.

    Raises InputError if the folder holds another run, or if there is nothing to resume from.
    """

    SHOWN = ("mean_weight", "pass_rate", "loss")  # beside the progress bar
    # These change nothing that has been computed so far, so a resumed run may change them.
    FREE_ARGS = frozenset({"resume", "max_steps", "save_every", "keep_checkpoints", "wandb"})

    def __init__(self, output_dir: str, args: dict, resume: bool):
        self.folder = Path(output_dir)
        self.args = json.loads(json.dumps({**args, "world_size": dist.get_world_size()}))
        # Rank 0 looks, for all: another host may see an older state of a shared folder.
        seen = [self._look(resume) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(seen)
        self.resume_from, complaint = seen[0]
        if complaint:
            raise InputError(complaint)
        self.saved_step = None
        if self.resume_from:
            self.saved_step = int(self.resume_from.name.removeprefix("checkpoint-"))

    def _look(self, resume: bool) -> tuple[Path | None, str | None]:
        """The checkpoint to resume from, and what is wrong with the folder or the arguments."""
        if self.args.get("wandb") and find_spec("wandb") is None:
            return None, "--wandb needs a package that is not installed: pip install wandb"
        if not resume:
            if self.folder.is_file() or (self.folder.is_dir() and any(self.folder.iterdir())):
                return None, f"{self.folder} is not empty: choose another output_dir, or --resume"
            return None, None
        checkpoints = sorted(self.folder.glob("checkpoint-*"))
        if not checkpoints:
            return None, f"{self.folder}: there is no checkpoint to resume from"
        before = json.loads((self.folder / "args.json").read_text())["args"]
        differing = [
            f"{name} {before.get(name)!r} -> {self.args.get(name)!r}"
            for name in sorted({*before, *self.args} - self.FREE_ARGS)
            if before.get(name) != self.args.get(name)
        ]
        if differing:
            return None, f"cannot resume with other arguments: {'; '.join(differing)}"
        return checkpoints[-1], None

    def start(self, engine: Engine, max_steps: int) -> int:
        """Restore the engine if resuming, open the metrics; returns the steps already done."""
        if self.resume_from:
            engine.load_state(self.resume_from)
        step = self.saved_step or 0
        self.interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._interrupt)
        if dist.get_rank() == 0:
            (self.folder / "rollouts").mkdir(parents=True, exist_ok=True)
            packages = ("torch", "transformers", "deepspeed", "math-verify")
            _write_json(
                self.folder / "args.json",
                {
                    "args": self.args,
                    "versions": {package: version(package) for package in packages},
                    "git_commit": _git_commit(),
                },
            )
            self._forget_after(step)
            self.metrics = (self.folder / "metrics.jsonl").open("a")
            if self.args.get("wandb"):
                import wandb

                wandb.init(project="osw-ft", dir=self.folder, config=self.args)
        interval = 0.5 if sys.stderr.isatty() else 10  # seconds between redraws
        self.bar = tqdm(
            total=max_steps,
            initial=step,
            unit="step",
            mininterval=interval,
            miniters=0,
            disable=dist.get_rank() > 0,
        )
        return step

    def say(self, message: str) -> None:
        """Print a line above the progress bar (rank 0)."""
        if dist.get_rank() == 0:
            self.bar.write(message, file=sys.stderr)

    def on_rollout(self, finished: int, total: int) -> bool:
        """Show how far sampling is; False when it should be given up."""
        self.bar.set_description(f"rollout {finished}/{total}", refresh=False)
        self.bar.update(0)
        return not self.interrupted

    def _forget_after(self, step: int) -> None:
        """Drop the rows of steps that were done after the checkpoint: they are done again."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text().splitlines(keepends=True)[:step]
            aside = metrics.with_suffix(".partial")
            aside.write_text("".join(lines))
            aside.rename(metrics)
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)

    def log(self, row: dict) -> None:
        """Append one step's metrics (rank 0 writes)."""
        if dist.get_rank() == 0:
            self.bar.set_description("update", refresh=False)
            self.bar.set_postfix(
                {k: f"{row[k]:.3f}" for k in self.SHOWN if k in row}, refresh=False
            )
            self.bar.update(1)
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
            if self.args.get("wandb"):
                import wandb

                wandb.log(row, step=row["step"])

    def save_rollouts(
        self,
        step: int,
        queries: Sequence[TokenizedExample],
        answers: Sequence[tuple],
        **per_query: torch.Tensor,
    ) -> None:
        """Write every answer, a (completion, verdict), of the batch that begins with `step`.

        The values (B,) of `per_query` go with each answer to their query. Rank 0 writes.
        """
        if dist.get_rank() == 0:
            values = {name: tensor.tolist() for name, tensor in per_query.items()}
            rows = [
                {
                    "id": queries[completion.query].example.id,
                    **{name: value[completion.query] for name, value in values.items()},
                    "correct": correct,
                    **asdict(completion),
                }
                for completion, correct in answers
            ]
            write_rows(rows, self.folder / "rollouts" / f"step_{step:06d}.jsonl")

    def save_checkpoint(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, step: int, keep: int
    ) -> None:
        """Write checkpoint-<step> aside, rename it, drop the oldest beyond `keep`. A collective.

        The folder is a plain Hugging Face model, with the training state in `state/`. Raises
        OSError if it cannot be written; the checkpoint before it stays.
        """
        if step == self.saved_step:
            return
        aside, final = (self.folder / f"{kind}-{step:06d}" for kind in ("partial", "checkpoint"))
        try:
            engine.save_state(aside)
            engine.save_model(tokenizer, aside)
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:  # torch.save says RuntimeError when a disk is full
            shutil.rmtree(aside, ignore_errors=True)
            reason = str(error).strip().splitlines()[0]
            raise OSError(f"step {step}: the checkpoint could not be written: {reason}") from error
        if dist.get_rank() == 0:
            aside.rename(final)
            for old in sorted(self.folder.glob("checkpoint-*"))[:-keep]:
                shutil.rmtree(old)
        dist.barrier()
        self.saved_step = step

    def save_final(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the trained model to final/, aside first. A collective."""
        aside, final = self.folder / "partial-final", self.folder / "final"
        engine.save_model(tokenizer, aside)
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)

    def _interrupt(self, signum: int, frame) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def should_stop(self) -> bool:
        """Whether any rank has received Ctrl-C or SIGTERM. A collective."""
        flag = torch.tensor(
            [float(self.interrupted)], device=get_accelerator().current_device_name()
        )
        dist.all_reduce(flag)
        return bool(flag)

    def finish(self, step: int, max_steps: int) -> None:
        """Print the table of a finished run and what it wrote; exit with 130 if it was stopped."""
        if dist.get_rank() == 0:
            self.bar.close()
            self.metrics.close()
            rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]
            print(summary(rows))
            for path in sorted(self.folder.iterdir()):
                print(path)
        if step < max_steps:
            if dist.get_rank() == 0:
                print(f"stopped after step {step} of {max_steps}: go on with --resume", flush=True)
            sys.exit(130)


def summary(rows: list[dict]) -> str:
    """A table of a run's metrics: means over its first and its last tenth, and all seconds."""
    if not rows:
        return "no step was done"
    tenth = max(1, len(rows) // 10)
    lines = [f"{'':24}{'first':>12}{'last':>12}  (mean of {tenth} steps)"]
    for key in rows[0]:
        if isinstance(rows[0][key], float) and not key.endswith("_s"):
            first, last = (
                sum(float(row[key]) for row in part) / tenth
                for part in (rows[:tenth], rows[-tenth:])
            )
            lines.append(f"{key:24}{first:12.4g}{last:12.4g}")
    for key in ("rollout_s", "verify_s", "train_s", "sync_s"):
        if key in rows[0]:
            lines.append(f"{key:24}{'':12}{sum(row[key] for row in rows):12.1f}")
    return "\n".join(lines)


def _write_json(path: Path, value: dict) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(value, indent=2) + "\n")
    aside.rename(path)


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or None
