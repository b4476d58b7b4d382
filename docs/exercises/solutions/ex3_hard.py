"""Exercise 3: is one answer enough?

Answers cost time, so why sample several of them? With K = 1 the weight 1 - p̂ is 0 or 1: one try
decides whether a solution is learnt. `hard` is 0 or 1 for every K: 0 if all K answers are right,
else 1. Let us see what more answers change in each of the two.

Task: write `expectation`, then answer the questions with it. Nothing is sampled: K answers have
only 2^K outcomes, so you can add up over all of them.
Hint: import itertools; `itertools.product([0, 1], repeat=k)` lists the outcomes. How probable is
each of them?
"""

import itertools
from collections.abc import Callable


def oswft(outcome: tuple[int, ...]) -> float:
    """The weight that these answers give; 1 is a right one."""
    return 1 - sum(outcome) / len(outcome)


def hard(outcome: tuple[int, ...]) -> float:
    return 0.0 if all(outcome) else 1.0


def expectation(value: Callable[[tuple[int, ...]], float], p: float, k: int) -> float:
    """The mean of `value(outcome)` over k answers, each of which is right with probability p.

    >>> round(expectation(hard, p=0.5, k=2), 6)
    0.75
    """
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=k):
        right = sum(outcome)
        total += p**right * (1 - p) ** (k - right) * value(outcome)
    return total


# A question that the model mostly solves: p = 0.9. Two decimals are enough.
MEAN_OSWFT_K1 = 0.1  # the mean weight
MEAN_OSWFT_K4 = 0.1  # 1 - p, whatever K is: the weight is unbiased
MEAN_HARD_K4 = 0.34  # 1 - p^K: one slip in four answers, and the solution counts in full
ZERO_OSWFT_K4 = 0.66  # how probable is the weight 0? The value is `lambda o: oswft(o) == 0`
ZERO_HARD_K4 = 0.66  # p^K for both: they differ in the weights above 0

# For which K do the two give the same weight for every outcome?
SAME_AT_K = 1
# With one answer, "all" and "the share of" are the same. Weights between 0 and 1 need at least
# K = 2.

# What do more answers change in OSW-FT's weight?
#   "A"  its mean    "B"  how far it scatters around its mean    "C"  both
MORE_ANSWERS_CHANGE = "B"
# The variance is p (1 - p) / K. A small K makes weights noisy, never wrong on average.

# To which number does the mean of `hard` go as K grows? (p is still 0.9)
HARD_GOES_TO = 1.0
# Sooner or later one of many answers is wrong: then each solution counts in full, as in SFT.
