"""How the model learns: DeepSpeed, micro-batches, backward, step, state.

The only file that imports deepspeed. One optimizer step is

    for batch in engine.micro_batches(rows):  # the same number on every rank
        logprobs = engine.logprobs(batch)                 # (B, T)
        engine.backward(loss(logprobs, batch.mask, ...), batch.is_last)
    stats = engine.step(learning_rate)

Losses add up over all micro-batches and ranks. So each divides by the normalizer of the whole
global batch, and any split of the batch gives the same gradient.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cpu
from data import InputError, MicroBatch, Rows, Trajectory, blame, collate, split_rows
from logprobs import LogprobModel
from models import ModelArgs, Tokenizer, checkpoint_tensors, load_model, stop_token_ids
from ranks import init_ranks

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GATHER_BYTES = 2**30  # size of the parameters that are copied at a time
MAX_VLLM_GAP = {"bf16": 0.1, "fp32": 1e-4}  # nats a token; rounding gives 0.01 and 3e-7
# The fp32 weight, for which DeepSpeed has no name, and Adam's moments.
STATE_KEYS = {"master": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
IDLE = Trajectory("idle", [0, 0, 0, 0], [])  # a rank without rows reads this


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Like `model.to(dtype)`, which would round the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@dataclass(kw_only=True)
class EngineArgs(ModelArgs):
    """How the model learns."""

    max_tokens_per_micro_batch: int = 8192  # tokens in one pass of a rank, padding included
    weight_decay: float = 0.0  # AdamW's; the paper names none
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    zero_stage: Literal[1, 2, 3] = 2  # what is sharded over ranks; 3, the paper's, fits more
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    cpu_offload: bool = False  # optimizer state in host memory


def load_engine(model: str, args: EngineArgs, checkpoint: Path | None = None) -> Engine:
    """An `Engine` for a model, or continued from a checkpoint. A collective."""
    engine = Engine(load_model(str(checkpoint or model), args.max_length, args.precision), args)
    if checkpoint:
        engine.load_state(checkpoint)
    return engine


def init_training() -> None:
    """Join the process group, with the backend that training needs. A collective."""
    if torch.cuda.is_available():
        # vLLM turns it off, too. So SFT, which runs without vLLM, has the same attention kernel.
        torch.backends.cuda.enable_cudnn_sdp(False)
        warnings.filterwarnings("ignore", "barrier")  # NCCL warns, though the device is set.
        init_ranks("nccl")
    else:
        cpu.keep_freed_memory()
        init_ranks("gloo")


def import_deepspeed():
    """Set what must be set first, import DeepSpeed, and hand it the process group."""
    if not torch.cuda.is_available():
        cpu.prepare_deepspeed()
    import deepspeed

    deepspeed.utils.logging.set_log_level_from_string("error")
    deepspeed.ops.__compatible_ops__ = {}  # It would compile an op for a minute.
    # DeepSpeed takes over our process group. One of its own would be bound to the GPU, and every
    # group that vLLM makes later would take 0.5 GiB more.
    deepspeed.init_distributed(verbose=False)
    gc.freeze()  # Else garbage collection takes half a second.
    return deepspeed


class Engine:
    """A DeepSpeed engine around a causal language model: AdamW and ZeRO."""

    def __init__(self, model: torch.nn.Module, args: EngineArgs):
        self.args = args
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        bf16 = args.precision == "bf16"
        if torch.cuda.is_available():
            model.cuda()  # Before the cast: all ranks' fp32 copies would fill the host's memory.
        # transformers sets it to the pad token: that token's embedding would get no gradient.
        model.get_input_embeddings().padding_idx = None
        cast_parameters(model, torch.float32)  # `checked` compares in fp32.
        with blame(model.name_or_path, (ValueError, ImportError)):
            model = LogprobModel.checked(model)
            cast_parameters(model, torch.bfloat16 if bf16 else torch.float32)
            model.model.generation_config.validate(strict=True)  # An invalid one cannot be saved.
        # Fused, it is one kernel, on CPUs too.
        options = {"weight_decay": args.weight_decay, "fused": True}
        self.adam = torch.optim.AdamW(model.parameters(), **options)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed asks for it; `micro_batches` decides.
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": args.max_grad_norm,
            "zero_optimization": {
                "stage": args.zero_stage,
                # One rank has nothing to scatter: it would only copy each gradient, three times.
                "reduce_scatter": dist.get_world_size() > 1 or args.zero_stage == 3,
            },
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler.
        }
        if not torch.cuda.is_available():
            config["zero_optimization"]["reduce_bucket_size"] = cpu.REDUCE_BUCKET
        if args.cpu_offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        self.deepspeed = import_deepspeed()
        dist.barrier()  # Wait for the slowest rank: DeepSpeed gives up in ten minutes.
        self.engine, *_ = self.deepspeed.initialize(model=model, optimizer=self.adam, config=config)
        self.model, self.device = model.model, self.engine.device
        self.total_loss = torch.zeros((), device=self.device)  # this rank's, so far
        self.num_steps = 0  # optimizer steps done
        self._allocate_moments()

    def micro_batches(self, rows: Rows, keep: Tensor | None = None) -> Iterator[MicroBatch]:
        """Yield this rank's share of the rows as micro-batches. All ranks must run it to its end.

        All ranks yield the same number of micro-batches, at least one. A rank that has no rows left
        yields `IDLE`, whose mask is all false and whose gradient is zero.

        Args:
            rows: the whole global batch, the same on every rank.
            keep: (N,) false for rows of weight or advantage 0: they have no gradient and are not
                computed, but the normalizer counts them. If none is kept, Adam steps anyway.
        """
        kept = range(len(rows)) if keep is None else keep.nonzero()[:, 0].tolist()
        lengths = [len(rows[i]) for i in kept]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        split = split_rows(lengths, ranks, self.args.max_tokens_per_micro_batch)
        shares = [[kept[n] for n in by_rank[rank]] for by_rank in split] or [[]]  # at least one
        for number, share in enumerate(shares, start=1):
            batch = collate(rows, share) if share else collate([IDLE], [0])
            batch.is_last = number == len(shares)
            yield batch.to(self.device)

    def logprobs(self, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
        """log pi of each completion token: (B, T) fp32, zero outside `batch.mask`."""
        return self.engine(batch.input_ids, batch.targets, batch.mask, temperature)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add a micro-batch's gradient; its loss is divided by the global batch's normalizer.

        `is_last` is the micro-batch's: whether the optimizer steps after it.
        """
        self.total_loss += loss.detach()
        self.engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages over the ranks; this gives the sum. gas: gradient accumulation steps.
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Clip the gradient and update the parameters; returns metrics of the step. A collective.

        Raises FloatingPointError if loss or gradient is not finite; no parameter has moved then.
        """
        dist.all_reduce(self.total_loss)
        loss = self.total_loss.item()
        self.total_loss.zero_()
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {self.num_steps + 1}: the loss is {loss}")
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.engine.step()  # It takes no step if the norm is not finite.
        grad_norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"step {self.num_steps + 1}: the gradient is {grad_norm}")
        self.num_steps += 1
        norms = {"grad_norm": grad_norm, "clipped": float(grad_norm > self.args.max_grad_norm)}
        return {"loss": loss, **norms, "learning_rate": learning_rate}

    @torch.no_grad()
    def eval_logprobs(
        self, rows: Rows, temperature: float = 1.0, keep: Tensor | None = None
    ) -> Tensor:
        """log pi of all rows under the current parameters, without a gradient. A collective.

        Returns (N, T) fp32, the same on every rank; zero outside the mask and in rows not kept.
        """
        longest = max(map(len, rows)) - 1
        total = torch.zeros(len(rows), longest, device=self.device)
        for batch in self.micro_batches(rows, keep):
            logprobs = self.logprobs(batch, temperature)[:, :longest]  # `IDLE` may be longer.
            total[:, : logprobs.shape[1]].index_add_(0, batch.indices, logprobs)
        dist.all_reduce(total)  # Each row is on one rank, and 0 on the others.
        return total

    def check_vllm(
        self, queries: Rows, completions: Sequence, temperature: float, strict: bool
    ) -> dict[str, float]:
        """How far vLLM's log-probabilities are from this model's, in nats a token. A collective.

        Compares each query's first completion, of (B, K), if it has log-probabilities. With
        `strict`, raises InputError if vLLM samples from another model.
        """
        answers = [group[0] for group in completions if group[0].logprobs]
        rows = [Trajectory("", queries[a.query].prompt_ids, a.token_ids) for a in answers]
        own = self.eval_logprobs(rows, temperature)  # (N, T)
        mask = collate(rows, range(len(rows))).mask
        sampled = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
        gaps = (own.cpu()[mask] - sampled).abs()  # a number for each token
        mean = gaps.mean().item()
        if strict and not mean < MAX_VLLM_GAP[self.args.precision]:
            gap = f"their log-probabilities differ by {mean:.2g} nats a token"
            raise InputError(f"vLLM does not sample from the model that is being trained: {gap}")
        return {"vllm_gap_mean": mean, "vllm_gap_max": gaps.max().item()}

    # ---- Weights and state -----------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter and buffer in full by its name in a checkpoint; tied ones once.

        A collective: all ranks must run the iterator to its end. The tensors are copies, which the
        caller may keep.
        """
        for bucket in self._gather():
            yield from checkpoint_tensors(self.model, bucket).items()

    def _gather(self) -> Iterator[dict[str, Tensor]]:
        """Copies of all parameters, about GATHER_BYTES at a time; then the persistent buffers."""
        buckets, size = {}, 0
        for name, parameter in self.model.named_parameters():
            buckets.setdefault(size // GATHER_BYTES, {})[name] = parameter
            numel = getattr(parameter, "ds_numel", parameter.numel())  # A shard's numel() is 0.
            size += numel * parameter.element_size()
        for bucket in buckets.values():
            with self.deepspeed.zero.GatheredParameters(list(bucket.values())):
                yield {name: parameter.detach().clone() for name, parameter in bucket.items()}
        persistent = self.model.state_dict().keys()
        buffers = self.model.named_buffers()
        yield {name: buffer.clone() for name, buffer in buffers if name in persistent}

    def save_model(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Write a plain Hugging Face folder, whose model stops at the end of turn. A collective."""
        parameters = {}
        for bucket in self._gather():
            if dist.get_rank() == 0:
                parameters |= {name: tensor.cpu() for name, tensor in bucket.items()}
        if dist.get_rank() == 0:
            sampling = self.model.generation_config
            sampling.eos_token_id = stop_token_ids(tokenizer, sampling.eos_token_id)
            rope = getattr(self.model.config, "rope_parameters", None) or {}
            if rope.get("rope_type") == "default":  # transformers 4 reads it here.
                self.model.config.rope_theta = rope["rope_theta"]
            self.model.save_pretrained(folder, state_dict=parameters)
            tokenizer.save_pretrained(folder)
        dist.barrier()

    def save_state(self, folder: Path) -> None:
        """Write what an exact resume needs beyond the model. A collective.

        state/<parameter>.safetensors holds its fp32 weight and Adam's two moments, in full: the
        number of ranks and the ZeRO stage may change.
        """
        (folder / "state").mkdir(parents=True, exist_ok=True)
        parameters, ranks = list(self.model.named_parameters()), dist.get_world_size()
        for start in range(0, len(parameters), ranks):
            tensors = {}
            for rank, (name, parameter) in enumerate(parameters[start : start + ranks]):
                for title, key in STATE_KEYS.items():
                    tensor = self.deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                    if rank == dist.get_rank():
                        own, tensors[title] = name, tensor.cpu()
                    del tensor  # A GPU needs its memory for the next one.
            if tensors:  # Now each rank writes its own.
                path = folder / "state" / f"{own}.safetensors"
                save_file(tensors, path, metadata={"step": str(self.num_steps)})
        dist.barrier()  # Wait for the slowest disk.

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote; the model has to be loaded from there. A collective."""
        for name, parameter in self.model.named_parameters():
            path = folder / "state" / f"{name}.safetensors"
            with blame(str(path)), safe_open(path, "pt") as file:  # It may be lost, or cut off.
                for title, key in STATE_KEYS.items():
                    self._set_state(parameter, key, file.get_tensor(title))
                num_steps = int(file.metadata()["step"])
        self._count_steps(num_steps)
        dist.barrier()

    def _set_state(self, parameter: torch.nn.Parameter, key: str | None, value: Tensor) -> None:
        """Set a parameter's fp32 weight, or one of its moments, from the full tensor."""
        utils = self.deepspeed.utils
        if self.args.zero_stage < 3:
            utils.safe_set_full_optimizer_state(parameter, value, key)
            return
        # That function forgets that ZeRO-3's shards are padded.
        size, ranks = parameter.ds_tensor.numel(), dist.get_world_size()
        padded = torch.nn.functional.pad(value.flatten(), (0, size * ranks - value.numel()))
        shard = padded.view(ranks, size)[dist.get_rank()]
        utils.safe_set_local_optimizer_state(parameter, shard, key)

    def _allocate_moments(self) -> None:
        """Let Adam make its moments, before vLLM counts the memory: take a step of gradient 0."""
        batch = collate([IDLE], [0]).to(self.device)
        self.backward(self.logprobs(batch).sum(), is_last=True)
        self.step(learning_rate=0.0)
        self._count_steps(0)

    def _count_steps(self, num_steps: int) -> None:
        """Set the number of optimizer steps done, also for Adam's bias correction."""
        self.num_steps = num_steps
        for state in self.adam.state.values():
            state["step"].fill_(num_steps)
