"""Does a run fit on given GPUs?

    python -m prepare.memory --model Qwen/Qwen3-4B-Base --gpus 8

Only the model's config is read, from the hub or from a folder: `--model demo/base` needs no hub.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import train_oswft
from engine import GATHER_BYTES
from launch import command_line, parse_args
from logprobs import MAX_LOGITS, LogprobModel
from look import markdown_table
from models import ModelArgs, count_parameters, load_config
from rollout import BYTES, FREE_BYTES, VLLM_SHARE, kv_cache_bytes

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

GIB = 2**30
RESERVE = 1 * GIB + FREE_BYTES  # 1 GiB for CUDA's context and NCCL: assumed
VLLM_OWN = 4 * GIB  # of vLLM's share, for activations and CUDA graphs: assumed
GRAPHS = 1 * GIB  # CUDA graphs, which stay while vLLM sleeps: assumed
LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # what ZeRO gathers and reduces at a time


@dataclass(kw_only=True)
class Args(train_oswft.Args):
    """The flags of train_oswft.py, and the GPUs."""

    data: str = "-"  # is not read, nor are the model's weights
    gpus: int = 8  # of all hosts together
    gpu_memory: float = 79  # GiB of each; one that is sold with 80 GB has 79


@functools.cache
def traced(model: str, precision: str) -> tuple[int, float, float]:
    """Of a model's config: parameters; bytes for backward, of a token and of a token in a layer."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    config.vocab_size, config.pad_token_id = 8, None  # What backward keeps does not depend on them.
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config.num_hidden_layers = 1
    one_layer = kept_for_backward(config, dtype)
    config.num_hidden_layers = 2
    per_layer = kept_for_backward(config, dtype) - one_layer
    return count_parameters(model, 1), one_layer - per_layer, per_layer


def kept_for_backward(config: PreTrainedConfig, dtype: torch.dtype, tokens: int = 64) -> float:
    """Bytes of a token that autograd keeps, parameters aside: counted in a pass."""
    network = LogprobModel(AutoModelForCausalLM.from_config(config, dtype=dtype))
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    sizes = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(ids, ids, torch.ones_like(ids, dtype=torch.bool))
    return sum(size for storage, size in sizes.items() if storage not in own) / tokens


def memory(args: Args) -> dict[str, dict[str, float]]:
    """Bytes of one GPU by part, in each phase of a run. Loading weights into vLLM takes less."""
    config = load_config(args.model, args.max_length)
    count, per_token, per_layer = traced(args.model, args.precision)
    size, stage, gpus = BYTES[args.precision], args.zero_stage, args.gpus
    layers, width, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    tokens = max(args.max_tokens_per_micro_batch, args.max_length)

    # ---- between two steps
    whole = stage == 1 and not args.cpu_offload  # no buckets, and the fp32 sum stays
    bucket = (count if whole else REDUCE_BUCKET) * size * (1 if stage == 3 or gpus == 1 else 2)
    added_up = not (args.cpu_offload and stage == 3)  # else in the host's memory
    gradients = added_up * count * 4 / (gpus if stage >= 2 else 1)
    held = {"reserve": RESERVE, "weights": count * size / (gpus if stage == 3 else 1)}
    held["optimizer"] = 0 if args.cpu_offload else count * 12 / gpus
    if stage == 3 or whole:  # else they are freed after a step
        held["gradients"] = gradients
    if stage == 3:
        held["reduce bucket"] = bucket
    vllm = (args.vllm_memory or VLLM_SHARE) * args.gpu_memory * GIB
    if args.vllm_sleep and not args.vllm_memory:
        vllm = max(0, args.gpu_memory * GIB - sum(held.values()))

    # ---- a backward pass, which needs most at its start, in its middle or at its end
    activations = tokens * (per_token + layers * per_layer)
    if args.gradient_checkpointing:  # every layer's input, and all of one layer
        activations = tokens * (per_token + layers * width * size + per_layer)
    embedding = vocabulary * width * size
    tied = embedding if getattr(config, "tie_word_embeddings", False) else 0
    # a chunk's gradient in both precisions, the next chunk's logits in both, the weight's gradient
    head = MAX_LOGITS["cuda"] * 2 * (4 + size) + embedding + tokens * width * (4 + size)
    start = {"activations": activations, "log-probabilities": head}
    middle = {"activations": activations, "a layer's backward": tokens * per_layer}
    middle |= {"embedding's gradient": tied, "reduce bucket": bucket}  # the head's, until the end
    end = {"embedding's gradient": tied + embedding}
    end["reduce bucket"] = bucket + min(count, REDUCE_BUCKET) * 4
    most = max(start, middle, end, key=lambda parts: sum((held | parts).values()))

    train = {"gathered weights": min(count, LIVE_PARAMETERS) * size} if stage == 3 else {}
    train |= {"gradients": gradients, **most, "vLLM": GRAPHS if args.vllm_sleep else vllm}
    # a parameter's fp32 state, or a bucket of weights and its copy
    save = {"gathered weights": max(vocabulary * width * 4, 2 * (GATHER_BYTES + embedding))}
    return {
        "load": {"weights": count * 4, "reserve": RESERVE},  # in fp32: the head is checked
        "train": held | train,
        "sample": held | {"vLLM": vllm},  # vLLM's start, too
        "save": held | save | {"vLLM": train["vLLM"]},  # asleep, even if stopped while it sampled
    }


def check_fit(args: Args) -> tuple[dict[str, dict[str, float]], float, list[str]]:
    """Bytes by phase and part, how many sequences vLLM's share holds, and what does not fit."""
    phases = memory(args)
    sizes = {phase: sum(parts.values()) / GIB for phase, parts in phases.items()}
    # Asleep, vLLM takes exactly what is left, up to rounding.
    large = {phase: size for phase, size in sizes.items() if size > args.gpu_memory + 1e-6}
    complaints = [f"{phase} takes {size:.1f} GiB" for phase, size in large.items()]
    weights = traced(args.model, args.precision)[0] * BYTES[args.precision]
    room = phases["sample"]["vLLM"] - VLLM_OWN - weights
    sequences = max(0, room / kv_cache_bytes(args.model, args.max_length, args.precision))
    if sequences < 1:
        complaints.append("vLLM's share does not hold the model and one sequence")
    return phases, sequences, complaints


def remedy(args: Args) -> str:
    """A sentence that names the fewest flags with which a run fits."""
    flags = {"vllm_sleep": True, "max_tokens_per_micro_batch": args.max_length, "vllm_memory": 0.5}
    flags |= {"zero_stage": 3, "gradient_checkpointing": True, "cpu_offload": True}  # slower ones
    for number in range(1, len(flags) + 1):
        for names in itertools.combinations(flags, number):
            if not check_fit(replace(args, **{name: flags[name] for name in names}))[2]:
                shown = " ".join(f"--{name} {flags[name]}".removesuffix(" True") for name in names)
                return f"It does with `{shown}`."
    return "No flag of the training scripts makes it fit: more GPUs, or larger ones."


def main(args: Args) -> list[str]:
    """The plan as Markdown paragraphs."""
    ModelArgs.check(args)  # RolloutArgs.check asks for more, on which no memory depends
    phases, sequences, complaints = check_fit(args)
    verdict = f"**It does not fit**: {'; '.join(complaints)}. {remedy(args)}" if complaints else ""
    share = phases["sample"]["vLLM"] / args.gpu_memory / GIB
    for parts in phases.values():
        parts["together"] = sum(parts.values())
        parts["left"] = args.gpu_memory * GIB - parts["together"]
    last = ("reserve", "together", "left")
    names = sorted(dict.fromkeys(itertools.chain(*phases.values())), key=last.__contains__)
    rows = [[n, *(f"{p[n] / GIB:.2f}" if n in p else "" for p in phases.values())] for n in names]
    count = traced(args.model, args.precision)[0]  # offloaded: gradients, master, Adam's two
    host = count * (BYTES[args.precision] + 16 / args.gpus * args.cpu_offload) / GIB
    return [
        f"{args.model}: {count / 1e6:,.1f}M parameters, {args.gpus} GPU{'s' * (args.gpus > 1)} "
        f"of {args.gpu_memory:g} GiB, {args.precision}. GiB of one GPU, by phase of a run:",
        markdown_table(["", *phases], rows),
        f"vLLM's share (`--vllm_memory {share:.2f}`) holds {sequences:.0f} sequences of "
        f"{args.max_length:,} tokens at once. vLLM's start needs what `sample` does; `save` is a "
        f"checkpoint. Each rank takes {host:.1f} GiB of its host's memory.",
        verdict or "**It fits.**",
    ]


if __name__ == "__main__":
    with command_line():
        print(*main(parse_args(Args, __doc__)), sep="\n\n")
