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
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
import transformers
import tyro
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from data import (
    InputError,
    MicroBatch,
    TokenizedExample,
    collate,
    load_config,
    load_examples,
    load_tokenizer,
    provenance,
    split_micro_batches,
    stop_token_ids,
    tokenize_examples,
    write_json,
    write_rows,
    written_aside,
)

# Logits held at once, whatever the vocabulary: as many as a CPU's cache takes, on a GPU enough for
# its matrix units (16 and 256 MiB in fp32).
LOGIT_TILE = {"cpu": 2**22, "cuda": 2**26}
GATHER_BYTES = 2**30  # parameters gathered at once under ZeRO-3
NORM_CHUNK = 2**24  # optimizer state looked at at once for its norms
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
EMPTY = ([0], [0])  # prompt and completion of the row that stands in where there is none


# ------------------------------------------------------------------------------------------------
# Per-token log-probabilities


class TiledLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], a tile of the vocabulary at a time.

    A (tokens x vocabulary) tensor never exists: for 4,096 tokens of Qwen3 it would take 2.5 GB in
    fp32, three times over. Backward computes the logits again: four matrix products instead of
    three. One autograd node, so under ZeRO-3 the head is one module call.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):  # (N, H), (V, H), (N,) -> (N,) fp32
        ctx.temperature, ctx.tiles = temperature, _tiles(hidden, weight)
        target_logits = torch.zeros_like(targets, dtype=torch.float32)
        log_normalizers = torch.full_like(target_logits, -torch.inf)
        for tile in ctx.tiles:
            logits = _logits(hidden, weight[tile], temperature)  # (N, tile)
            index, inside = _within(tile, targets)
            target_logits += torch.where(inside, logits.gather(-1, index)[:, 0], 0)
            log_normalizers = torch.logaddexp(log_normalizers, logits.logsumexp(-1))
        ctx.save_for_backward(hidden, weight, targets, log_normalizers)
        return target_logits - log_normalizers

    @staticmethod
    def backward(ctx, grad):  # (N,)
        hidden, weight, targets, log_normalizers = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        grad = grad / ctx.temperature
        for tile in ctx.tiles:
            logits = _logits(hidden, weight[tile], ctx.temperature)  # (N, tile)
            # d logprob / d (hidden @ weight.T) = (onehot(target) - softmax(logits)) / temperature
            grad_logits = logits.sub_(log_normalizers[:, None]).exp_().mul_(-grad[:, None])
            index, inside = _within(tile, targets)
            grad_logits.scatter_add_(-1, index, torch.where(inside, grad, 0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden += grad_logits @ weight[tile]
            torch.mm(grad_logits.T, hidden, out=grad_weight[tile])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _tiles(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Slices of the vocabulary; each has LOGIT_TILE logits at most, for all tokens together."""
    size = max(1, LOGIT_TILE[hidden.device.type] // max(1, len(hidden)))
    return [slice(start, start + size) for start in range(0, len(weight), size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _within(tile: slice, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each target: a column (N, 1) of the tile, and whether it is the target's (N,)."""
    index = targets - tile.start
    inside = (index >= 0) & (targets < tile.stop)
    return torch.where(inside, index, 0)[:, None], inside


class LogprobHead(torch.nn.Module):
    """Stands in for `lm_head`: hidden states and targets in, log-probabilities out."""

    def __init__(self, weight: torch.nn.Parameter):
        super().__init__()
        self.weight = weight  # the same Parameter, so tied embeddings stay tied

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        return TiledLogprobs.apply(hidden, self.weight, targets, temperature)


# For its own "sdpa" transformers asks in every pass whether the positions need a mask, and on a GPU
# the host would wait for the answer. It builds no mask for an attention that it does not know.
CAUSAL_ATTENTION = "causal_sdpa"
AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)


class LogprobModel(torch.nn.Module):
    """A causal language model that returns the log-probabilities of given tokens, not logits."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        model.set_output_embeddings(LogprobHead(model.get_output_embeddings().weight))
        if getattr(model.config, "sliding_window", None) is None:
            model.set_attn_implementation(CAUSAL_ATTENTION)
        self.model = model

    def forward(self, input_ids, targets, positions, temperature):  # (B, T), (N,), (N,) -> (N,)
        # No mask: rows are padded on the right, and causal attention never looks there.
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return head(hidden.flatten(0, 1).index_select(0, positions), targets, temperature)


# ------------------------------------------------------------------------------------------------
# Arguments


@dataclass
class TrainArgs:
    """What all methods share. A training script's `Args` adds what is its own."""

    model: str  # hub id or folder of a causal language model with a chat template
    data: str  # hub id or JSONL file with id, question, solution, answer, source
    output_dir: str = "runs/run"  # for all that the run leaves; all hosts share it
    resume: bool = False  # go on from the newest checkpoint in output_dir
    seed: int = 0  # of the data order and of sampling

    # Optimization
    learning_rate: float = 1e-5  # constant
    train_batch_size: int = 128  # examples per optimizer step
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    num_epochs: int = 1  # passes over the data
    max_steps: int | None = None  # optimizer steps, instead of num_epochs

    # Lengths, in tokens
    max_length: int = 5120  # prompt + solution, prompt + rollout; longer rows are dropped
    max_completion_length: int = 4096  # of a rollout; a prompt leaves room for it, or is dropped
    max_tokens_per_micro_batch: int = 8192  # in one forward pass of one rank, padding included

    # The machine
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16 keeps fp32 master weights
    zero_stage: Literal[0, 1, 2, 3] = 3  # what DeepSpeed shards over ranks (one rank: at most 2)
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    cpu_offload: bool = False  # optimizer state in host memory

    # What is kept
    save_every: int = 50  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # the newest ones, from which a run can go on
    wandb: bool = False  # mirror the metrics to Weights & Biases

    @property
    def batch_size(self) -> int:
        """Examples that are drawn at once."""
        return self.train_batch_size

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on each batch: S of Theorem 2."""
        return 1

    def num_steps(self, num_examples: int) -> int:
        """Optimizer steps of the run; what is left of the last epoch's last batch is not used."""
        batches = num_examples * self.num_epochs // self.batch_size
        return self.max_steps or batches * self.steps_per_batch

    def check(self, world_size: int) -> None:
        """Raise InputError for what cannot work, before anything is loaded or written."""
        for name, value in vars(self).items():
            if type(value) is int and value < (0 if name in ("seed", "zero_stage") else 1):
                raise InputError(f"--{name} must be at least 1, got {value}")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise InputError(f"--{name} must be above 0, got {getattr(self, name)}")
        if self.max_completion_length >= self.max_length:
            raise InputError("--max_completion_length must leave room for a prompt in --max_length")


@dataclass
class RolloutArgs(TrainArgs):
    """What the methods share that sample answers while they train."""

    # Rollouts
    temperature: float = 1.0  # of sampling
    rollout_batch_size: int = 128  # queries answered at once
    train_batch_size: int | None = None  # queries per optimizer step; default: all of them
    vllm_memory: float = 0.3  # share of the GPU's (on CPU: the host's) memory for vLLM
    vllm_tensor_parallel: int = 1  # GPUs that sample from one copy of the model together
    vllm_sleep: bool = False  # vLLM gives its GPU memory back while the model trains
    verifier_workers: int = 2  # processes per rank that check answers

    @property
    def batch_size(self) -> int:
        return self.rollout_batch_size

    @property
    def steps_per_batch(self) -> int:
        return self.rollout_batch_size // (self.train_batch_size or self.rollout_batch_size)

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.rollout_batch_size % (self.train_batch_size or 1):
            raise InputError(
                f"--train_batch_size {self.train_batch_size} does not divide "
                f"--rollout_batch_size {self.rollout_batch_size}"
            )
        if (self.max_steps or 0) % self.steps_per_batch:
            raise InputError(
                f"--max_steps {self.max_steps} ends within a batch of {self.steps_per_batch} steps"
            )
        if world_size % self.vllm_tensor_parallel:
            raise InputError(
                f"--vllm_tensor_parallel {self.vllm_tensor_parallel} does not divide "
                f"{world_size} ranks"
            )
        if not self.temperature > 0:
            raise InputError(f"--temperature must be above 0, got {self.temperature}")
        if not 0 < self.vllm_memory < 1:
            raise InputError(f"--vllm_memory is a share between 0 and 1, got {self.vllm_memory}")


def parse_args(args_class: type, description: str):
    """Read a script's dataclass from the command line; of several ranks only the first speaks."""
    return tyro.cli(
        args_class,
        args=[arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")],  # the launcher's
        description=description,
        use_underscores=True,
        console_outputs=int(os.environ.get("RANK", 0)) == 0,
    )


# ------------------------------------------------------------------------------------------------
# Ranks


def init_distributed() -> int:
    """Join the process group that the deepspeed launcher prepared; returns the world size."""
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
    # On CPU, DeepSpeed would leave a buffer of 66 MiB in shared memory for every rank and port.
    dist.barrier()  # each rank has opened those of the others: the names are not needed any more
    place = "_".join([str(os.getuid()), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]])
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}_{dist.get_rank()}")
    buffer.unlink(missing_ok=True)
    return dist.get_world_size()


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


def check_answers(
    verifier, completions: Sequence, queries: Sequence[TokenizedExample]
) -> tuple[list[tuple], torch.Tensor]:
    """Verify this rank's completions, and share the verdicts with all ranks. A collective.

    Args:
        verifier: a `verify.Verifier`.
        completions: this rank's share of `Rollout.generate`.
        queries: the whole batch, the same on every rank.

    Returns:
        every rank's (completion, verdict), in the order of the queries; rewards (B, K), 1 if right.
    """
    verdicts = verifier.score(
        [completion.text for completion in completions],
        [queries[completion.query].example.answer for completion in completions],
    )
    answers = gather(list(zip(completions, verdicts, strict=True)))
    answers.sort(key=lambda answer: answer[0].query)
    rewards = torch.tensor([float(right) for _, right in answers]).view(len(queries), -1)
    return answers, rewards


# ------------------------------------------------------------------------------------------------
# The engine


def load_training_data(args: TrainArgs) -> tuple[PreTrainedTokenizerBase, list[TokenizedExample]]:
    """The model's tokenizer, and the examples that fit. Raises InputError if they are too few."""
    tokenizer = load_tokenizer(args.model)
    examples, dropped = tokenize_examples(
        load_examples(args.data), tokenizer, args.max_length, args.max_completion_length
    )
    if not examples or not args.num_steps(len(examples)):
        raise InputError(
            f"{args.data}: {len(examples)} examples are left (dropped: {dropped}), too few for a "
            f"batch of {args.batch_size}"
        )
    if dist.get_rank() == 0:
        print(f"{len(examples):,} examples, dropped: {dropped}", file=sys.stderr)
    return tokenizer, examples


def load_model(path_or_hub_id: str, max_length: int) -> PreTrainedModel:
    """Load a causal language model. Raises InputError if it is absent or made for shorter text."""
    config = load_config(path_or_hub_id, max_length, f"--max_length {max_length}")
    try:
        return AutoModelForCausalLM.from_pretrained(path_or_hub_id, config=config)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path_or_hub_id}: cannot load a model from there: {reason}") from error


class Engine:
    """A DeepSpeed engine around a causal language model: AdamW, constant learning rate, ZeRO.

    Args:
        model: the model to train, in full.
        precision: "bf16" (with fp32 master weights) or "fp32".
        zero_stage: 0 to 3, what is sharded over ranks: nothing, optimizer state, + gradients,
            + parameters. Over a single rank 3 is run as 2: there would be nothing to gather, but
            each module would wait for it, and hold a second copy.
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
        if dist.get_world_size() == 1:
            zero_stage = min(zero_stage, 2)
        bf16 = precision == "bf16"
        for parameter in model.parameters():  # model.to() would round the rotary frequencies too
            parameter.data = parameter.data.to(torch.bfloat16 if bf16 else torch.float32)
        model = LogprobModel(model).train()
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate,
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=0.0,
            fused=True,  # one kernel, on CPUs too
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

    @classmethod
    def from_args(cls, args: TrainArgs) -> "Engine":
        """Load `--model` and train it with the settings of the command line."""
        return cls(
            load_model(args.model, args.max_length),
            learning_rate=args.learning_rate,
            max_grad_norm=args.max_grad_norm,
            precision=args.precision,
            zero_stage=args.zero_stage,
            gradient_checkpointing=args.gradient_checkpointing,
            cpu_offload=args.cpu_offload,
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.module.model

    def update(
        self,
        rows: Sequence[TokenizedExample],
        loss_fn: Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor],
        max_tokens: int,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on the sum of `loss_fn` over `rows`, the same on every rank.

        Args:
            rows: the sequences that have a gradient; leave out those that have none. With no row
                at all Adam steps from its momentum alone, as it does on a gradient of zero.
            loss_fn: logprobs (B, T), mask (B, T), B indices into rows -> scalar, divided by the
                normalizer of the *global* batch.
            max_tokens: in one forward pass of one rank, padding included.
            temperature: the logits are divided by it.

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
            logprobs = self.logprobs(batch, temperature)
            if mine:
                loss = loss_fn(logprobs, self._to_device(batch.mask), mine)
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

    @torch.no_grad()
    def score(
        self, rows: Sequence[TokenizedExample], max_tokens: int, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """log pi of each row's completion tokens under the current weights. A collective.

        Returns:
            one tensor (completion tokens,) for each row, in host memory, the same on every rank.
        """
        scored = []
        for shares in split_micro_batches(
            [len(row) for row in rows], dist.get_world_size(), max_tokens
        ):
            mine = shares[dist.get_rank()]
            batch = collate([(rows[i].prompt_ids, rows[i].completion_ids) for i in mine] or [EMPTY])
            logprobs = self.logprobs(batch, temperature).cpu()
            scored += [(i, logprobs[n][batch.mask[n]]) for n, i in enumerate(mine)]
        return [logprobs for _, logprobs in sorted(gather(scored), key=lambda pair: pair[0])]

    def logprobs(self, batch: MicroBatch, temperature: float = 1.0) -> torch.Tensor:
        """log pi(target) for every completion token: (B, T) fp32, zero outside `batch.mask`."""
        positions = batch.mask.flatten().nonzero()[:, 0]  # on the CPU: no synchronisation
        targets = self._to_device(batch.targets.flatten()[positions])
        positions, input_ids = self._to_device(positions), self._to_device(batch.input_ids)
        logprobs = self.engine(input_ids, targets, positions, temperature)
        padded = logprobs.new_zeros(batch.mask.numel()).index_copy(0, positions, logprobs)
        return padded.view(batch.mask.shape)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that the host does not wait for: to a GPU it goes from pinned memory."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

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


class Stopwatch:
    """Seconds by phase."""

    def __init__(self):
        self.last, self.seconds = time.perf_counter(), {}

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def skip(self) -> None:
        """Book the time since the last lap nowhere."""
        self.last = time.perf_counter()

    def read(self) -> dict[str, float]:
        """What was booked since the last reading."""
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return seconds


class Run:
    """What a run leaves in its output folder, and whether it has been asked to stop.

    Args:
        args: of the script; a resumed run must have the same ones.
        keep_models: a checkpoint beyond the newest `--keep_checkpoints` loses its training state,
            but its model stays.

    Raises InputError if the folder holds another run, or if there is nothing to resume from.
    """

    SHOWN = ("mean_weight", "pass_rate", "reward", "loss")  # beside the progress bar
    # These change nothing that has been computed so far, so a resumed run may change them.
    FREE_ARGS = frozenset({"resume", "max_steps", "save_every", "keep_checkpoints", "wandb"})

    def __init__(self, args: TrainArgs, keep_models: bool = False):
        self.folder = Path(args.output_dir)
        self.keep_checkpoints, self.keep_models = args.keep_checkpoints, keep_models
        self.args = {**json.loads(json.dumps(asdict(args))), "world_size": dist.get_world_size()}
        # Rank 0 looks, for all: another host may see an older state of a shared folder.
        seen = [self._look(args.resume) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(seen)
        self.resume_from, complaint = seen[0]
        if complaint:
            raise InputError(complaint)
        self.clock = Stopwatch()
        self.saved_step = None
        if self.resume_from:
            self.saved_step = int(self.resume_from.name.removeprefix("checkpoint-"))

    def _look(self, resume: bool) -> tuple[Path | None, str | None]:
        """The checkpoint to resume from, and what is wrong with the folder or the arguments."""
        if self.args["wandb"] and find_spec("wandb") is None:
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
        self.max_steps = max_steps
        if self.resume_from:
            engine.load_state(self.resume_from)
        step = self.saved_step or 0
        self.interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._interrupt)
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json({"args": self.args, **provenance()}, self.folder / "args.json")
            self._forget_after(step)
            self.metrics = (self.folder / "metrics.jsonl").open("a")
            if self.args["wandb"]:
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
        self.clock.skip()
        return step

    def lap(self, phase: str) -> None:
        """Book the seconds since the last lap under `phase`, e.g. "train_s"."""
        self.clock.lap(phase)

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
            with written_aside(metrics) as aside:
                aside.write_text("".join(lines))
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)

    def log(self, row: dict) -> None:
        """Append one step's metrics, and its seconds by phase (rank 0 writes)."""
        seconds = self.clock.read()
        tokens = row.get("rollout_tokens", 0) + row["train_tokens"]
        row = {**row, "tokens_per_second": tokens / sum(seconds.values()), **seconds}
        if dist.get_rank() == 0:
            self.bar.set_description("update", refresh=False)
            self.bar.set_postfix(
                {k: f"{row[k]:.3f}" for k in self.SHOWN if k in row}, refresh=False
            )
            self.bar.update(1)
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
            if self.args["wandb"]:
                import wandb

                wandb.log(row, step=row["step"])

    def save_rollouts(
        self,
        step: int,
        queries: Sequence[TokenizedExample],
        answers: Sequence[tuple],
        **values: torch.Tensor,
    ) -> None:
        """Write every answer, a (completion, verdict), of the batch that begins with `step`.

        With each answer go its `values`: (B,) one for a query, or (B, K) one for an answer. Rank 0
        writes.
        """
        if dist.get_rank() == 0:
            shape = (len(queries), len(answers) // len(queries))
            columns = {
                name: value.reshape(len(queries), -1).expand(shape).flatten().tolist()
                for name, value in values.items()
            }
            rows = [
                {
                    "id": queries[completion.query].example.id,
                    **{name: column[n] for name, column in columns.items()},
                    "correct": correct,
                    **vars(completion),  # asdict would copy every token of it
                }
                for n, (completion, correct) in enumerate(answers)
            ]
            write_rows(rows, self.folder / "rollouts" / f"step_{step:06d}.jsonl")

    def save_checkpoint(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, step: int
    ) -> None:
        """Write checkpoint-<step> aside, rename it, drop the oldest. A collective.

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
            for old in sorted(self.folder.glob("checkpoint-*"))[: -self.keep_checkpoints]:
                doomed = old / "state" if self.keep_models else old
                if doomed.exists():
                    shutil.rmtree(doomed)
        dist.barrier()
        self.saved_step = step
        self.clock.skip()

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

    def finish(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, step: int) -> None:
        """Save a finished run's model, or a stopped one's checkpoint; print the table.

        Exits with 130 if the run was stopped. A collective.
        """
        self.save_checkpoint(engine, tokenizer, step)
        if step == self.max_steps:
            self.save_final(engine, tokenizer)
        if dist.get_rank() == 0:
            self.bar.close()
            self.metrics.close()
            rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]
            print(summary(rows))
            for path in sorted(self.folder.iterdir()):
                print(path)
        if step < self.max_steps:
            if dist.get_rank() == 0:
                print(f"stopped after step {step} of {self.max_steps}: go on with --resume")
                sys.stdout.flush()
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
    for key in rows[0]:
        if key.endswith("_s"):
            lines.append(f"{key:24}{'':12}{sum(row[key] for row in rows):12.1f}")
    return "\n".join(lines)
