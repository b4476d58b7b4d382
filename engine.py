"""How the model learns: ranks, DeepSpeed, passes, backward, step, weights, state.

The only file that imports deepspeed. One optimizer step is

    for batch in engine.passes(rows, max_tokens):    # the same number of passes on every rank
        logprobs = engine.logprobs(batch)            # (B, T)
        engine.backward(loss(logprobs, batch.mask, ...))
    stats = engine.step()

Its gradient is that of the losses' sum over all passes and ranks. So a loss divides by the
normalizer of the whole global batch, and any split of the batch gives the same gradient.
"""

import contextlib
import math
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import Module
from torch.utils import cpp_extension
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from data import (
    InputError,
    MicroBatch,
    Trajectory,
    collate,
    first_line,
    load_config,
    one_line,
    split_micro_batches,
)
from logprobs import CHECK_TOKENS, LogprobModel, has_windows
from prompts import stop_token_ids
from ranks import be_alone, clear_stale_lock, share_cores, watch
from run import TrainArgs, is_out_of_memory

GATHER_BYTES = 2**30  # parameters gathered at a time under ZeRO-3
STATE_BYTES = 2**28  # parameters whose state goes into one file
STATE_KEYS = ("master", "exp_avg", "exp_avg_sq")  # the fp32 weight, and Adam's moments
NORM_CHUNK = 2**24  # numbers of Adam's state whose norm is taken at a time
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
MAX_ATTENTION_GAP = 0.1  # nats a token, on average, between two attentions: bf16 gives 0.01


# ------------------------------------------------------------------------------------------------
# Ranks


def import_deepspeed():
    """It takes seconds, and only a run needs it: not `--help`, nor who imports a loss."""
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # to load torch's compiler takes a second
    import deepspeed

    return deepspeed


def init_distributed() -> int:
    """Join the process group that the launcher prepared, if one did; returns the world size."""
    if "RANK" not in os.environ:
        be_alone()
    deepspeed = import_deepspeed()
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about DeepSpeed's calls
    transformers.utils.logging.disable_progress_bar()
    deepspeed.utils.logging.set_log_level_from_string("error")
    deepspeed.accelerator.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    share_cores()
    # On a CPU, DeepSpeed compiles an op at the first start. That needs ninja, which ssh to another
    # host does not find, and a linker, for which torch does not quote a path that holds a space.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    clear_stale_lock()
    deepspeed.init_distributed(verbose=False)
    watch("go on with --resume, if a checkpoint was written")
    # On CPU, DeepSpeed leaves a buffer of 66 MiB in shared memory for every rank and port.
    dist.barrier()  # now each rank has opened those of the others, and the names can go
    place = "_".join([str(os.getuid()), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]])
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}_{dist.get_rank()}")
    buffer.unlink(missing_ok=True)
    return dist.get_world_size()


def gather(items: list) -> list:
    """Every rank's list, one after the other, on every rank. A collective."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def gather_rewards(
    completions: Sequence, verdicts: Sequence[float], num_queries: int
) -> tuple[list, torch.Tensor]:
    """Share each rank's completions and their verdicts with all ranks. A collective.

    Returns:
        all completions in the order of the queries; rewards (B, K) in [0, 1], 1 if right.
    """
    judged = gather(list(zip(completions, verdicts, strict=True)))
    judged.sort(key=lambda pair: pair[0].query)
    rewards = torch.tensor([float(verdict) for _, verdict in judged]).view(num_queries, -1)
    return [completion for completion, _ in judged], rewards


# ------------------------------------------------------------------------------------------------
# The engine


def load_model(path_or_hub_id: str, max_length: int) -> PreTrainedModel:
    """Load a causal language model. Raises InputError if it is absent, broken or too short."""
    config = load_config(path_or_hub_id, max_length, f"--max_length {max_length}")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path_or_hub_id, config=config, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many types
        if is_out_of_memory(error):
            raise
        reason = f"cannot load a model from there: {first_line(error)}"
        raise InputError(f"{path_or_hub_id}: {reason}") from error
    if missing := sorted(report["missing_keys"]):  # transformers makes random ones in their place
        raise InputError(f"{path_or_hub_id}: {len(missing)} weights are missing: {missing[0]} ...")
    try:
        model.generation_config.validate(strict=True)  # else the first save would find it out
    except ValueError as error:
        raise InputError(f"{path_or_hub_id}: generation_config.json: {one_line(error)}") from error
    return model


def cast_parameters(model: Module, dtype: torch.dtype) -> None:
    """Like `model.to(dtype)`, which would round the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class Engine:
    """A DeepSpeed engine around a causal language model: AdamW, constant learning rate, ZeRO.

    Args:
        model: the model to train, in full.
        precision: "bf16" (with fp32 master weights) or "fp32".
        zero_stage: 0 to 3, what is sharded over ranks: nothing, optimizer state, + gradients,
            + parameters. A single rank runs 3 as 2: stage 3 would only add waiting and a second
            copy of the weights.
        attn: "sdpa", or another attention under the name that transformers knows it by.
    """

    max_stage_alone = 2  # the tests on one GPU set 3

    def __init__(
        self,
        model: PreTrainedModel,
        learning_rate: float,
        max_grad_norm: float,
        precision: str = "bf16",
        zero_stage: int = 3,
        gradient_checkpointing: bool = False,
        cpu_offload: bool = False,
        attn: str = "sdpa",
    ):
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        if dist.get_world_size() == 1:
            zero_stage = min(zero_stage, self.max_stage_alone)
        bf16 = precision == "bf16"
        cast_parameters(model, torch.float32)  # the check is sharp without rounding
        try:
            model = LogprobModel.checked(model)
        except ValueError as error:
            without = "; try without --gradient_checkpointing" if gradient_checkpointing else ""
            raise InputError(f"{error}{without}") from error
        cast_parameters(model, torch.bfloat16 if bf16 else torch.float32)
        # For some models vLLM takes transformers' class and changes it; ours becomes a class apart.
        base = model.model.base_model
        base.__class__ = type(type(base).__name__, (type(base),), {"__call__": Module.__call__})
        self.adam = torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate,
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=0.0,
            fused=True,  # one kernel, on CPUs too
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,  # nominal: `passes` says which pass is the last
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
        self.deepspeed = import_deepspeed()
        self.engine, *_ = self.deepspeed.initialize(model=model, optimizer=self.adam, config=config)
        self.device = self.engine.device
        self.zero_stage = zero_stage
        self._count_steps(0)  # at stage 0 in bf16 DeepSpeed has taken one already, on nothing
        if zero_stage == 3:
            self._clear_padding()
        if zero_stage == 0:  # in bf16 DeepSpeed gives Adam fp32 copies, in the same order
            pairs = zip(self.model.parameters(), self.adam.param_groups[0]["params"], strict=True)
            self._full_weights = dict(pairs)
        self._begin_step()
        if attn != "sdpa":
            self._use_attention(attn)

    @classmethod
    def from_args(cls, args: TrainArgs, checkpoint: Path | None = None) -> "Engine":
        """Load `--model`, or a checkpoint's, and train it with the settings of the command line."""
        engine = cls(
            load_model(str(checkpoint or args.model), args.max_length),
            learning_rate=args.learning_rate,
            max_grad_norm=args.max_grad_norm,
            precision=args.precision,
            zero_stage=args.zero_stage,
            gradient_checkpointing=args.gradient_checkpointing,
            cpu_offload=args.cpu_offload,
            attn=args.attn,
        )
        if checkpoint:
            engine.load_state(checkpoint)
        return engine

    def _use_attention(self, name: str) -> None:
        """Train with another attention than the model was checked with. A collective.

        That check is in fp32 on the CPU, where flash attention does not run. So here the two are
        compared once more. Raises InputError if they differ, or if this one cannot be used.
        """
        config, before = self.model.config, self.model.config._attn_implementation
        if name != "eager" and (
            has_windows(config) or getattr(config, "attn_logit_softcapping", 0)
        ):
            # a kernel that does not know them may drop them, and short rows would not show it
            raise InputError(f"--attn {name}: for a model with windows or soft caps take sdpa")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (CHECK_TOKENS,), generator=generator).tolist()
        rows = [Trajectory("", ids[:1], ids[1:n]) for n in range(2, CHECK_TOKENS, 4)]  # are padded
        checked = self.score(rows, max_tokens=2048)  # (N, T)
        try:
            self.model.set_attn_implementation(name)
            gaps = (self.score(rows, max_tokens=2048) - checked).abs()
        except (ImportError, ValueError, RuntimeError) as error:  # no package, no name, an old GPU
            raise InputError(f"--attn {name}: {one_line(error)}") from error
        if name != before == config._attn_implementation:
            raise InputError(f"--attn {name}: this model has no attention but {before}")
        gap = gaps.sum().item() / sum(len(row.completion_ids) for row in rows)
        if not gap < MAX_ATTENTION_GAP:
            raise InputError(f"--attn {name}: log-probabilities are {gap:.2g} nats a token off")

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Set to zero what fills up ZeRO-3's last shards: DeepSpeed leaves there any numbers."""
        utils = self.deepspeed.utils
        for parameter in self.model.parameters():
            shard = utils.safe_get_local_fp32_param(parameter)
            shard[max(0, parameter.ds_numel - dist.get_rank() * shard.numel()) :] = 0
            utils.safe_set_local_fp32_param(parameter, shard)

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.module.model

    def _begin_step(self) -> None:
        self.total_loss = torch.zeros((), device=self.device)  # of this rank's passes so far
        self.row_logprobs: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows, their sums

    def passes(
        self, rows: Sequence[Trajectory], max_tokens: int, keep: torch.Tensor | None = None
    ) -> Iterator[MicroBatch]:
        """This rank's share of the rows, a micro-batch for each forward and backward pass.

        Every pass is a collective, so all ranks make the same number of them, and at least one. A
        rank that has no row left repeats one with an all-false mask: its gradient is zero.

        Args:
            rows: the whole global batch, the same on every rank.
            max_tokens: in one pass of one rank, padding included.
            keep: (N,) false for rows without a gradient, which cost no pass. If none is kept,
                Adam steps from its momentum alone, as it does on a gradient of zero.
        """
        self.rows = rows
        kept = range(len(rows)) if keep is None else keep.nonzero()[:, 0].tolist()
        lengths = [len(rows[i]) for i in kept]
        shares = split_micro_batches(lengths, dist.get_world_size(), max_tokens)
        shares = [[kept[n] for n in share[dist.get_rank()]] for share in shares] or [[]]
        shortest = min(range(len(rows)), key=lambda i: len(rows[i]))
        for number, share in enumerate(shares, start=1):
            batch = collate(rows, share or [shortest], learn=bool(share))
            self.engine.set_gradient_accumulation_boundary(number == len(shares))
            yield batch.to(self.device)

    def logprobs(self, batch: MicroBatch, temperature: float = 1.0) -> torch.Tensor:
        """log pi(target) of every completion token: (B, T) fp32, zero outside `batch.mask`.

        The logits are divided by `temperature`.
        """
        targets = batch.targets.flatten().index_select(0, batch.positions)
        logprobs = self.engine(batch.input_ids, targets, batch.positions, temperature)  # (N,)
        padded = logprobs.new_zeros(batch.mask.numel()).index_copy(0, batch.positions, logprobs)
        padded = padded.view(batch.mask.shape)
        if torch.is_grad_enabled():
            self.row_logprobs.append((batch.rows, padded.detach().sum(dim=1)))
        return padded

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss that is divided by the normalizer of the global batch."""
        self.total_loss += loss.detach()
        # DeepSpeed averages over ranks; ours is a sum.
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def step(self) -> dict[str, float]:
        """Clip the gradient and update the weights. A collective.

        Returns:
            loss, grad_norm (before clipping), clipped, update_norm_ratio, learning_rate.

        Raises FloatingPointError, with the step and the rows, if loss or gradient is not finite.
        """
        dist.all_reduce(self.total_loss)
        step = self.num_steps + 1
        if not self.total_loss.isfinite():
            ids = [
                self.rows[row].id
                for rows, sums in self.row_logprobs
                for row, finite in zip(rows.tolist(), sums.isfinite().tolist(), strict=True)
                if not finite
            ]
            raise FloatingPointError(f"step {step}: loss is {self.total_loss}, rows {gather(ids)}")
        loss = self.total_loss.item()
        self._begin_step()
        if self.zero_stage == 0 and not self.engine.bfloat16_enabled():  # DeepSpeed keeps no norm
            grads = [p.grad for p in self.engine.module.parameters()]
            grad_norm = float(torch.nn.utils.get_total_norm(grads))
            if math.isfinite(grad_norm):
                self.engine.step()
        else:
            self.engine.step()  # takes no step if the norm is not finite
            grad_norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            ids = [row.id for row in self.rows]
            raise FloatingPointError(f"step {step}: gradient is {grad_norm}, rows {ids}")
        self.num_steps = step
        return {
            "loss": loss,
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

    @torch.no_grad()
    def score(
        self,
        rows: Sequence[Trajectory],
        max_tokens: int,
        temperature: float = 1.0,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """log pi of all rows under the current weights, without a gradient. A collective.

        Returns:
            (N, T) fp32 on this engine's device, the same on every rank; zero outside the mask of
            `collate`, and in rows that are not kept.
        """
        longest = max(map(len, rows)) - 1
        scores = torch.zeros(len(rows), longest, device=self.device)
        for batch in self.passes(rows, max_tokens, keep):
            logprobs = self.logprobs(batch, temperature)
            scores[:, : logprobs.shape[1]].index_add_(0, batch.rows, logprobs)
        dist.all_reduce(scores)  # each row was scored by one rank
        return scores

    def named_weights(self, gather_bytes: int = GATHER_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight in full under the name that it has in a checkpoint; tied ones once.

        A collective: all ranks have to run the iterator to its end. Under ZeRO-3 about
        `gather_bytes` are gathered at a time. The tensors are copies, which the caller may keep.
        """
        for bucket in self._gather(gather_bytes):
            # transformers may hold a mixture's experts in one tensor, a checkpoint one by one
            yield from revert_weight_conversion(self.model, bucket).items()

    def _buckets(self, gather_bytes: int) -> Iterator[dict[str, torch.nn.Parameter]]:
        """All parameters by name, so many bytes at a time, at least one."""
        bucket, size = {}, 0
        for name, parameter in self.model.named_parameters():
            numel = getattr(parameter, "ds_numel", parameter.numel())  # numel() of a shard is 0
            if bucket and size + numel * parameter.element_size() > gather_bytes:
                yield bucket
                bucket, size = {}, 0
            bucket[name] = parameter
            size += numel * parameter.element_size()
        yield bucket

    def _gather(self, gather_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        """Copies of all parameters, so many bytes at a time; then of the persistent buffers."""
        for bucket in self._buckets(gather_bytes):
            with self.deepspeed.zero.GatheredParameters(list(bucket.values())):
                yield {name: parameter.detach().clone() for name, parameter in bucket.items()}
        persistent = self.model.state_dict().keys()
        buffers = self.model.named_buffers()
        yield {name: buffer.clone() for name, buffer in buffers if name in persistent}

    def save_model(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a plain Hugging Face folder that stops at the end of turn. A collective."""
        weights = {}
        for bucket in self._gather(GATHER_BYTES):
            if dist.get_rank() == 0:
                weights |= {name: tensor.cpu() for name, tensor in bucket.items()}
        if dist.get_rank() == 0:
            self.model.generation_config.eos_token_id = stop_token_ids(tokenizer)
            self.model.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
        dist.barrier()

    def save_state(self, folder: Path) -> None:
        """Write what a checkpoint's model lacks for going on exactly: a collective.

        state/*.safetensors hold, for each parameter, its fp32 weight and Adam's two moments. They
        do not depend on the number of ranks or the ZeRO stage.
        """
        (folder / "state").mkdir(parents=True, exist_ok=True)
        if self.num_steps == 0:  # a run that was stopped in its first rollout
            self._make_moments()
        for number, bucket in enumerate(self._buckets(STATE_BYTES)):
            writes = number % dist.get_world_size() == dist.get_rank()
            tensors = {}
            for name, parameter in bucket.items():
                for key in STATE_KEYS:
                    tensor = self._get_state(parameter, key)  # a collective
                    if writes:
                        tensors[f"{name}.{key}"] = tensor.cpu()
            if writes:
                path = folder / "state" / f"{number:05d}.safetensors"
                save_file(tensors, path, metadata={"step": str(self.num_steps)})

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, into an engine that was made from the same folder's model.

        A collective. Raises InputError if something is missing.
        """
        self._make_moments()
        with contextlib.ExitStack() as stack:
            paths = sorted((folder / "state").glob("*.safetensors"))
            try:
                files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
                where = {}
                for file in files:
                    where |= dict.fromkeys(file.keys(), file)
                for name, parameter in self.model.named_parameters():
                    for key in STATE_KEYS:
                        tensor = where[f"{name}.{key}"].get_tensor(f"{name}.{key}")
                        self._set_state(parameter, key, tensor)
            except (OSError, KeyError, SafetensorError) as error:
                reason = f"not a complete checkpoint: {first_line(error)}"
                raise InputError(f"{folder}: {reason}") from error
            self._count_steps(int(files[0].metadata()["step"]))

    def _make_moments(self) -> None:
        """Let Adam make its moments, in whatever shards: a step with gradient 0 moves no weight."""
        row = Trajectory("nothing", [0], [0])
        for batch in self.passes([row], max_tokens=2, keep=torch.zeros(1)):
            self.backward(self.logprobs(batch).sum())
        self.step()
        self._count_steps(0)

    def _count_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for state in self.adam.state.values():
            state["step"].fill_(num_steps)

    def _get_state(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        """One of STATE_KEYS of a parameter, in full, fp32. A collective."""
        if self.zero_stage == 0:
            weight = self._full_weights[parameter]
            return weight.detach() if key == "master" else self.adam.state[weight][key]
        if key == "master":
            return self.deepspeed.utils.safe_get_full_fp32_param(parameter)
        return self.deepspeed.utils.safe_get_full_optimizer_state(parameter, key)

    @torch.no_grad()
    def _set_state(self, parameter: torch.nn.Parameter, key: str, value: torch.Tensor) -> None:
        if self.zero_stage == 0:
            self._get_state(parameter, key).copy_(value)
            return
        utils = self.deepspeed.utils
        set_weight, set_moment = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        if self.zero_stage == 3:  # there the functions above forget that shards are padded
            set_weight = utils.safe_set_local_fp32_param
            set_moment = utils.safe_set_local_optimizer_state
            size = parameter.ds_tensor.numel()
            padding = size * dist.get_world_size() - value.numel()
            padded = torch.nn.functional.pad(value.flatten(), (0, padding))
            value = padded.narrow(0, size * dist.get_rank(), size)
        if key == "master":
            set_weight(parameter, value)
        else:
            set_moment(parameter, value, key)
