"""One rank of bench.scaling. The deepspeed launcher starts it; rank 0 prints seconds of a step."""

from pathlib import Path
from statistics import median

import torch.distributed as dist

from bench.scaling import MAX_LENGTH, scaling_step
from bench.setup import training_setup
from run import parse_args


def main(model: Path, turns: int = 3) -> None:
    """Print the median over so many turns; one more comes first and does not count."""
    with training_setup(model, MAX_LENGTH, num_workers=1) as setup:
        seconds = [scaling_step(setup, larger=4) for _ in range(1 + turns)][1:]
    if dist.get_rank() == 0:
        print(f"seconds {median(seconds)}")


if __name__ == "__main__":
    parse_args(main, __doc__)
