"""How the CPU is used; the functions after `share_cores` are for machines without a GPU.

Whatever starts imports it before torch, which reads the two variables below when it is loaded.
"""

import contextlib
import ctypes
import os
import sys

# Threads that spin while they wait are 8 times slower beside a busy core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Without it torch prints to which NUMA node vLLM binds it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

REDUCE_BUCKET = 2**22  # parameters; ZeRO allocates its buckets anew for each micro-batch


def share_cores() -> None:
    """Give each rank its share of the cores, unless OMP_NUM_THREADS is set; vLLM's default is 1."""
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_SIZE", 1)))
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]  # torchrun sets 1 if the user set nothing.
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # It may be "8,2".


def bf16_is_slow() -> bool:
    """Whether a product in bf16 takes some ten times as long here as one in fp32."""
    return not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"


def warn_of_slow_bf16(precision: str) -> None:
    if precision == "bf16" and bf16_is_slow():
        print("warning: bf16 is slow on a CPU without AVX-512: --precision fp32", file=sys.stderr)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next micro-batch: new pages take a tenth of an update."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h has their numbers.
    with contextlib.suppress(AttributeError):  # Another libc has no mallopt.
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**25)  # Before glibc 2.35 this is the most.
        for option in trim_threshold, mmap_threshold:
            ctypes.CDLL(None).mallopt(option, 2**31 - 1)


def prepare_deepspeed() -> None:
    """Set what must be set before DeepSpeed is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Loading torch's compiler takes a second.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Otherwise DeepSpeed warns.


def prepare_vllm() -> None:
    """Set what must be set before vLLM is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Compiling takes seconds, and gains none.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # Use gloo, not vLLM 0.32's shared memory: all runs on a host would have the same name for it.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def available_memory() -> int:
    """Bytes that are free for vLLM: within the container, on the NUMA node that it will use."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    return get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory


def vllm_options(share: float, weights: int, cache: int, max_length: int) -> dict[str, int | bool]:
    """vLLM's options on a CPU; weights and cache are in bytes.

    The ranks of a host have `share` of what is available. The KV cache gets what the weights leave
    of it, and at most the `cache` that it can use, as vLLM touches all of it.
    """
    own = share * available_memory() / int(os.environ.get("LOCAL_SIZE", 1))
    return {
        "kv_cache_memory_bytes": min(cache, int(own) - weights),
        "block_size": 32,  # Only whole blocks of a prompt are shared.
        "enforce_eager": True,
        # Chunked prefill with seeds crashes vLLM's sampler: a CPU generator cannot undo a draw.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_length, 8192),
    }


def repack(model: torch.nn.Module) -> None:
    """Pack matrices anew: vLLM 0.32 keeps old copies of a tied head and experts after a reload."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():  # Else it has only the copy.
            method.process_weights_after_loading(module)
