"""A reward function that needs no answer to judge: `--reward bench/coin.py:coin`."""

import random


def coin(completion: str, example) -> float:
    """Right at a rate of 0.7."""
    return float(random.Random(completion).random() < 0.7)
