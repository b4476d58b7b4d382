"""Does a run fit on given GPUs?

    python -m prepare.memory --model Qwen/Qwen3-4B-Base --gpus 8

Only the model's config is read, from the hub or from a folder: `--model demo/base` needs no hub.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from unittest import mock

import train_oswft
from engine import GATHER_BYTES, EngineArgs
from launch import command_line, parse_args
from logprobs import MAX_LOGITS, LogprobModel
from look import markdown_table
from models import load_config
from rollout import FREE_BYTES, VLLM_SHARE, kv_cache_bytes

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

CONTEXT = 2**30  # bytes of CUDA's context and NCCL: assumed
VLLM_OWN = 4 * 2**30  # bytes of vLLM's share for activations and CUDA graphs: assumed
GRAPHS = 2**30  # bytes of CUDA graphs, which stay while vLLM sleeps: assumed
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # what ZeRO gathers and reduces at a time

BYTES = {"bf16": 2, "fp32": 4}


@dataclass(kw_only=True)
class Args(train_oswft.Args):
    """The flags of train_oswft.py, and the GPUs."""

    data: str = "-"  # is not read, nor are the model's weights
    gpus: int = 8  # of all hosts together
    gpu_memory: float = 79  # GiB of each; one that is sold with 80 GB has 79


@functools.cache
def traced(model: str, precision: str) -> tuple[int, float, float]:
    """Of a model's config: parameters; bytes for backward, of a token and of a token in a layer.

    The forward pass is traced without data: what autograd keeps is counted, not estimated.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # A traced tensor does not tell that rows are not packed, and packed ones would need a mask.
    unpacked = mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    # Nor where a mask is true: here it is true everywhere.
    all_true = mock.patch.object(
        torch.Tensor, "nonzero", lambda mask: torch.arange(len(mask))[:, None]
    )
    with FakeTensorMode(allow_non_fake_inputs=True), unpacked, all_true:
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
        network(ids, ids, torch.ones_like(ids, dtype=torch.bool))
    return sum(sizes.values()) / tokens


def memory(args: Args) -> dict[str, dict[str, float]]:
    """Bytes of one GPU by part, in each phase of a run.

    While weights go into vLLM, less is held than in one of these phases. vLLM's start takes what
    sampling takes. Before a checkpoint vLLM sleeps, also if the run was stopped while it sampled.
    """
    config = load_config(args.model, args.max_length)
    count, per_token, per_layer = traced(args.model, args.precision)
    size, gpus = BYTES[args.precision], args.gpus
    layers, width = config.num_hidden_layers, config.hidden_size
    stage = args.zero_stage
    tokens = max(args.max_tokens_per_micro_batch, args.max_length)

    gradients = count * 4 / (gpus if stage >= 2 else 1)
    whole = stage == 1 and not args.cpu_offload  # no buckets, and the fp32 sum stays
    sent = count if whole else REDUCE_BUCKET  # gradients at a time
    copies = 1 if stage == 3 or gpus == 1 else 2  # A copy of it is sent.
    bucket = sent * size * copies
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
    total = args.gpu_memory * 2**30
    left = max(0, total - sum(held.values()) - CONTEXT - FREE_BYTES)
    vllm = left if args.vllm_sleep else VLLM_SHARE * total
    if args.vllm_memory:
        vllm = args.vllm_memory * total
    gathered = {"gathered weights": min(count, LIVE_PARAMETERS) * size} if stage == 3 else {}
    train = {
        **held,
        **gathered,
        "gradients": gradients,
        **max(start, middle, end, key=lambda parts: sum((held | parts).values())),
        "vLLM": GRAPHS if args.vllm_sleep else vllm,
    }
    largest = config.vocab_size * width * 4  # a parameter's state, gathered in fp32
    save = {**held, "gathered weights": max(largest, 2 * GATHER_BYTES), "vLLM": train["vLLM"]}
    phases = {"load": {"weights": count * 4}}  # in fp32: the head is checked
    phases |= {"train": train, "sample": {**held, "vLLM": vllm}, "save": save}
    return {phase: {**parts, "reserve": CONTEXT + FREE_BYTES} for phase, parts in phases.items()}


def check_fit(args: Args) -> tuple[dict[str, dict[str, float]], list[str], float]:
    """Bytes by phase and part, what does not fit, and how many sequences vLLM's share holds."""
    EngineArgs.check(args)  # RolloutArgs.check asks for more, on which no memory depends
    phases, complaints = memory(args), []
    for phase, parts in phases.items():
        # asleep, vLLM takes exactly what is left, up to rounding
        if (total := sum(parts.values()) / 2**30) > args.gpu_memory + 1e-6:
            complaints.append(f"{phase} takes {total:.1f} GiB")
    count = traced(args.model, args.precision)[0]
    room = phases["sample"]["vLLM"] - VLLM_OWN - count * BYTES[args.precision]
    cache = kv_cache_bytes(args.model, args.max_length, args.precision)
    if room < cache:
        complaints.append("vLLM's share does not hold the model and one sequence")
    return phases, complaints, max(0, room / cache)


def remedy(args: Args) -> str:
    """A sentence that names the fewest flags with which a run fits."""
    # those with the least side effects first
    remedies = {"vllm_sleep": True, "max_tokens_per_micro_batch": args.max_length}
    remedies |= {"vllm_memory": 0.5, "zero_stage": 3, "gradient_checkpointing": True}
    remedies |= {"cpu_offload": True}
    for number in range(1, len(remedies) + 1):
        for chosen in itertools.combinations(remedies.items(), number):
            if not check_fit(replace(args, **dict(chosen)))[1]:
                shown = [f"--{k}" if v is True else f"--{k} {v}" for k, v in chosen]
                return f"It does with `{' '.join(shown)}`."
    return "No flag of the training scripts makes it fit: more GPUs, or larger ones."


def main(args: Args) -> list[str]:
    """The plan as Markdown paragraphs."""
    phases, complaints, sequences = check_fit(args)
    columns = [{**parts, "together": sum(parts.values())} for parts in phases.values()]
    for sizes in columns:
        sizes["left"] = args.gpu_memory * 2**30 - sizes["together"]
    last = ("reserve", "together", "left")
    names = dict.fromkeys(part for sizes in phases.values() for part in sizes if part not in last)
    rows = [
        [part, *(f"{sizes[part] / 2**30:.2f}" if part in sizes else "" for sizes in columns)]
        for part in (*names, *last)
    ]
    verdict = "**It fits.**"
    if complaints:
        verdict = f"**It does not fit**: {'; '.join(complaints)}. {remedy(args)}"
    share = phases["sample"]["vLLM"] / args.gpu_memory / 2**30
    full = args.vllm_sleep and not args.vllm_memory
    full = "; it takes all that the trainer leaves, less the reserve" if full else ""
    count = traced(args.model, args.precision)[0]  # offloaded: gradients, master, Adam's two
    host = count * (BYTES[args.precision] + 16 / args.gpus * args.cpu_offload) / 2**30
    return [
        f"{args.model}: {count / 1e6:,.1f}M parameters, {args.gpus} GPU{'s' * (args.gpus > 1)} "
        f"of {args.gpu_memory:g} GiB, {args.precision}. GiB of one GPU, by phase of a run:",
        markdown_table(["", *phases], rows),
        f"vLLM's share (`--vllm_memory {share:.2f}`) holds {sequences:.0f} sequences of "
        f"{args.max_length:,} tokens at once{full}. vLLM's start needs what `sample` does; `save` "
        f"is a checkpoint. Each rank takes {host:.1f} GiB of its host's memory.",
        verdict,
    ]


if __name__ == "__main__":
    with command_line():
        print(*main(parse_args(Args, __doc__)), sep="\n\n")
