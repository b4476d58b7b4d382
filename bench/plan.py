"""Does a run fit on given GPUs? python -m bench.plan --model Qwen/Qwen3-4B-Base --gpus 8"""

import functools
import itertools
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from tyro.conf import OmitArgPrefixes

import train_oswft
from bench.measure import markdown_table, print_section
from data import InputError
from engine import load_config
from logprobs import MAX_LOGITS, LogprobModel
from rollout import RESERVE, kv_cache_bytes, memory_share
from run import RolloutArgs, TrainArgs

VLLM_OWN = 4 * 2**30  # bytes of vLLM's share for activations and CUDA graphs: assumed
GRAPHS = 2**30  # bytes of CUDA graphs, which stay while vLLM sleeps: assumed
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # what ZeRO gathers and reduces at a time


@dataclass(kw_only=True)
class Args:
    model: str  # hub id or folder; no weights are read
    gpus: int = 8  # of all hosts together
    gpu_memory: float = 79  # GiB of each; one that is sold with 80 GB has 79
    # Flags of train_oswft.py, with its defaults
    zero_stage: Literal[1, 2, 3] = train_oswft.Args.zero_stage
    gradient_checkpointing: bool = train_oswft.Args.gradient_checkpointing
    cpu_offload: bool = train_oswft.Args.cpu_offload
    max_length: int = train_oswft.Args.max_length
    max_tokens_per_micro_batch: int = train_oswft.Args.max_tokens_per_micro_batch
    vllm_memory: float | None = train_oswft.Args.vllm_memory
    vllm_tensor_parallel: int = train_oswft.Args.vllm_tensor_parallel
    vllm_sleep: bool = train_oswft.Args.vllm_sleep


@functools.cache
def traced(model: str, precision: str) -> tuple[int, float, float]:
    """Of a model's config: parameters; bytes for backward, of a token and of a token in a layer.

    The forward pass is traced without data: what autograd keeps is counted, not estimated.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # A traced tensor does not tell that rows are not packed, and packed ones would need a mask.
    unpacked = mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    with FakeTensorMode(allow_non_fake_inputs=True), unpacked:
        num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        config.num_hidden_layers = 1
        one_layer = kept_for_backward(config, dtype)
        config.num_hidden_layers = 2
        per_layer = kept_for_backward(config, dtype) - one_layer
    return num_parameters, one_layer - per_layer, per_layer


def kept_for_backward(config: PreTrainedConfig, dtype: torch.dtype, tokens: int = 1024) -> float:
    """Bytes of a token that autograd keeps, parameters aside."""
    network = LogprobModel(AutoModelForCausalLM.from_config(config, dtype=dtype))
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    sizes = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes() if storage._cdata not in own else 0
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(ids, ids[0], torch.arange(tokens))
    return sum(sizes.values()) / tokens


def memory(args: RolloutArgs, gpus: int, gpu_memory: float) -> dict[str, dict[str, float]]:
    """Bytes of one GPU by part, in each phase of a step; `gpu_memory` is in GiB."""
    config = load_config(args.model, args.max_length)
    count, per_token, per_layer = traced(args.model, args.precision)
    size = 2 if args.precision == "bf16" else 4
    layers, width = config.num_hidden_layers, config.hidden_size
    stage = args.zero_stage if gpus > 1 else min(args.zero_stage, 2)
    tokens = max(args.max_tokens_per_micro_batch, args.max_length)

    gradients = count * 4 / (gpus if stage >= 2 else 1)
    whole = stage == 1 and not args.cpu_offload  # no buckets, and the fp32 sum stays
    sent = count if whole else REDUCE_BUCKET  # gradients at a time
    # while one bucket is sent, the other one fills; a whole gradient is copied to be sent
    bucket = sent * size * (2 if stage < 3 and gpus > 1 else 1)
    if args.cpu_offload and stage == 3:  # the other stages add them up on the GPU
        gradients = 0
    held = {
        "weights": count * size / (gpus if stage == 3 else 1),
        "optimizer": 0 if args.cpu_offload else count * 12 / gpus,
    }
    if stage == 3 or whole:  # else they are freed after a step
        held["gradients"] = gradients
    if stage == 3:
        held["reduce bucket"] = bucket
    activations = tokens * (per_token + layers * per_layer)
    if args.gradient_checkpointing:  # every layer's input, and all of one layer
        activations = tokens * (per_token + layers * width * size + per_layer)
    # a chunk's gradient in both precisions, the next chunk's logits in both, the weight's gradient
    logits, gradient = MAX_LOGITS["cuda"], config.vocab_size * width * size
    head = logits * 2 * (4 + size) + gradient + tokens * width * (4 + size)
    tied = gradient if getattr(config, "tie_word_embeddings", False) else 0
    start = {"activations": activations, "log-probabilities": head}  # of a backward pass
    middle = {
        "activations": activations,
        "a layer's backward": tokens * per_layer,
        "embedding's gradient": tied,  # the head's, until the embedding's is added
        "reduce bucket": bucket,
    }
    end = {"embedding's gradient": tied + gradient}
    end["reduce bucket"] = bucket + min(count, REDUCE_BUCKET) * 4
    total = gpu_memory * 2**30
    left = memory_share(sum(held.values()), total, args.vllm_sleep)
    vllm = total * (args.vllm_memory or max(0, left))
    train = {
        **held,
        "gradients": gradients,
        "gathered weights": min(count, LIVE_PARAMETERS) * size if stage == 3 else 0,
        **max(start, middle, end, key=lambda parts: sum((held | parts).values())),
        "vLLM": GRAPHS if args.vllm_sleep else vllm,
    }
    # While weights go into vLLM, less is held than in one of these two.
    phases = {"start": {"weights": count * 4}}  # in fp32, whatever the stage: the check is sharp
    phases |= {"train": train, "sample": {**held, "vLLM": vllm}}
    return {phase: {**parts, "reserve": RESERVE} for phase, parts in phases.items()}


def check_fit(args: Args, **changes) -> tuple[dict[str, dict[str, float]], list[str], float]:
    """Bytes by phase and part, what does not fit, and how many sequences vLLM's share holds.

    `changes` are flags in place of those of `args`.
    """
    flags = {**vars(args), "data": "-", "max_completion_length": args.max_length - 1, **changes}
    del flags["gpus"], flags["gpu_memory"]
    run_args = train_oswft.Args(**flags)
    TrainArgs.check(run_args)  # the subclass's asks for the ranks of this host
    shared_by = run_args.vllm_tensor_parallel
    if args.gpus % shared_by:
        raise InputError(f"--vllm_tensor_parallel does not divide the {args.gpus} GPUs")
    phases, complaints = memory(run_args, args.gpus, args.gpu_memory), []
    for phase, parts in phases.items():
        if (total := sum(parts.values()) / 2**30) > args.gpu_memory:
            complaints.append(f"{phase} takes {total:.1f} GiB")
    room = phases["sample"]["vLLM"] - VLLM_OWN - traced(args.model, "bf16")[0] * 2 / shared_by
    sequences = room / (kv_cache_bytes(args.model, args.max_length, "bf16") / shared_by)
    if sequences < 1:
        complaints.append("vLLM's share does not hold the model and one sequence")
    return phases, complaints, max(0, sequences)


def remedy(args: Args) -> str:
    """A sentence that names the fewest flags with which a run fits."""
    remedies = {  # those with the least side effects first
        "vllm_sleep": True,
        "max_tokens_per_micro_batch": args.max_length,
        "vllm_memory": 0.5,
        "zero_stage": 3,
        "gradient_checkpointing": True,
        "vllm_tensor_parallel": 2,
        "cpu_offload": True,
    }
    if args.gpus % 2:
        del remedies["vllm_tensor_parallel"]
    for number in range(1, len(remedies) + 1):
        for chosen in itertools.combinations(remedies.items(), number):
            if not check_fit(args, **dict(chosen))[1]:
                shown = [f"--{k}" if v is True else f"--{k} {v}" for k, v in chosen]
                return f"It does with `{' '.join(shown)}`."
    return "No flag of the training scripts makes it fit: more GPUs, or larger ones."


def main(args: OmitArgPrefixes[Args]) -> list[str]:
    """The plan as Markdown paragraphs."""
    phases, complaints, sequences = check_fit(args)
    rows = []
    for part in dict.fromkeys(part for parts in phases.values() for part in parts):
        sizes = [parts.get(part) for parts in phases.values()]
        rows.append([part, *("" if size is None else f"{size / 2**30:.2f}" for size in sizes)])
    sums = [f"**{sum(parts.values()) / 2**30:.2f}**" for parts in phases.values()]
    verdict = "**It fits.**"
    if complaints:
        verdict = f"**It does not fit**: {'; '.join(complaints)}. {remedy(args)}"
    count, share = traced(args.model, "bf16")[0], phases["sample"]["vLLM"] / args.gpu_memory / 2**30
    host = count * (2 + 16 / args.gpus * args.cpu_offload) / 2**30  # bf16; gradients, master, Adam
    return [
        f"{args.model}: {count / 1e6:,.1f}M parameters, {args.gpus} GPUs "
        f"of {args.gpu_memory:g} GiB, bf16. GiB of one GPU, by phase of a step:",
        markdown_table(["", *phases], [*rows, ["together", *sums]]),
        f"vLLM's share (`--vllm_memory {share:.2f}`) holds {sequences:.0f} sequences of "
        f"{args.max_length:,} tokens at once. Each rank takes {host:.1f} GiB of its host's memory.",
        verdict,
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
