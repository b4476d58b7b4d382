"""One rank of bench.scaling, started by the deepspeed launcher: a step for each line on stdin."""

import sys
from pathlib import Path

import torch.distributed as dist

from bench.scaling import MAX_LENGTH, scaling_step
from bench.setup import training_setup
from engine import finish, on_rank_0
from run import parse_args


def main(model: Path) -> None:
    """Rank 0 prints the seconds of each step."""
    with training_setup(model, MAX_LENGTH, num_workers=1) as setup:
        while on_rank_0(sys.stdin.readline):  # empty at the end of the file
            seconds = scaling_step(setup, larger=4)
            if dist.get_rank() == 0:
                print(f"seconds {seconds}", flush=True)
    finish(0)


if __name__ == "__main__":
    parse_args(main, __doc__)
