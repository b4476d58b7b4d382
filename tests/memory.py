"""Run by test_bench.py and test_gpu.py through the launcher: what a model's step really holds.

Prints JSON: on a CPU bytes of one rank by part, as `bench.plan.memory` names them; on a GPU the
most that was allocated.
"""

import ctypes
import json
import sys

import train_sft
from bench.gpu import random_rows
from engine import finish, init_distributed, load_engine

import psutil
import torch
import torch.distributed as dist

folder, (length, rows_per_rank, checkpointing) = sys.argv[-4], map(int, sys.argv[-3:])
init_distributed()
passes = 1 + torch.cuda.is_available()  # the second adds to the gradients of the first
num_rows = passes * rows_per_rank * dist.get_world_size()
rows = random_rows([(1, length - 1)] * num_rows, range(1000))
RATE = 1e-5
settings = {"max_tokens_per_micro_batch": rows_per_rank * length}
settings["zero_stage"] = 2 if torch.cuda.is_available() else 3  # on one GPU 3 runs as 2
settings["gradient_checkpointing"] = bool(checkpointing)
engine = load_engine(folder, length, **settings)
between_steps = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

resident = []  # after the embedding, and before the log-probabilities
network = engine.model.base_model
network.layers[0].register_forward_pre_hook(lambda *_: resident.append(rss()))
network.norm.register_forward_hook(lambda *_: resident.append(rss()))


def rss() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not look like free memory
    return psutil.Process().memory_info().rss


train_sft.update(engine, rows[: dist.get_world_size()], RATE)  # Adam's state exists from here on
if torch.cuda.is_available():
    torch.cuda.reset_peak_memory_stats()
    train_sft.update(engine, rows, RATE)
    free, total = torch.cuda.mem_get_info()
    peak = {"allocated": torch.cuda.max_memory_allocated(), "of the GPU": total - free}
    print("held", json.dumps({**peak, "between steps": between_steps}))
    finish(0)
resident.clear()
train_sft.update(engine, rows, RATE)
zero = engine.engine.optimizer
states = [x for state in engine.adam.state.values() for x in state.values()]
held = {
    "weights": sum(p.ds_tensor.nbytes for p in engine.model.parameters()),
    "gradients": zero.grad_partitions_flat_buffer.nbytes,
    "reduce bucket": sum(bucket.buffer.nbytes for bucket in zero.ipg_buckets.values()),
    "optimizer": sum(x.nbytes for x in [*zero.fp32_partitioned_groups_flat, *states]),
    "activations": resident[1] - resident[0],
}
assert all(torch.isfinite(p.ds_tensor).all() for p in engine.model.parameters())
if dist.get_rank() == 0:
    print("held", json.dumps(held))
finish(0)
