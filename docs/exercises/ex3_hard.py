"""Exercise 3: is one answer enough?

Answers cost time, so why sample several of them? With K = 1 the weight 1 - p̂ is 0 or 1: one try
decides whether a solution is learnt. `hard` is 0 or 1 for every K: 0 if all K answers are right,
else 1. Let us see what more answers change in each of the two.

Task: write `expectation`, then answer the questions with it. Nothing is sampled: K answers have
only 2^K outcomes, so you can add up over all of them.
Hint: import itertools; `itertools.product([0, 1], repeat=k)` lists the outcomes. How probable is
each of them?
"""

from collections.abc import Callable


def oswft(outcome: tuple[int, ...]) -> float:
    """The weight that these answers give; 1 is a right one."""
    return 1 - sum(outcome) / len(outcome)


def hard(outcome: tuple[int, ...]) -> float:
    return 0.0 if all(outcome) else 1.0


def expectation(value: Callable[[tuple[int, ...]], float], p: float, k: int) -> float:
    """The mean of `value(outcome)` over k answers, each of which is right with probability p.

    Args:
        value: for the order of the answers it makes no difference. It need not be one of the above.
        p: from 0 to 1, both included.

    >>> round(expectation(hard, p=0.5, k=2), 6)
    0.75
    """
    raise NotImplementedError("write `expectation`")


# A question that the model mostly solves: p = 0.9. Round to two decimals, or to more.
MEAN_OSWFT_K1 = ...  # the mean weight
MEAN_OSWFT_K4 = ...
MEAN_HARD_K4 = ...
ZERO_OSWFT_K4 = ...  # how probable is the weight 0? The value is `lambda o: oswft(o) == 0`
ZERO_HARD_K4 = ...

# For which K do the two give the same weight for every outcome?
SAME_AT_K = ...

# What do more answers change in OSW-FT's weight?
#   "A"  its mean    "B"  how far it scatters around its mean    "C"  both
MORE_ANSWERS_CHANGE = ...

# To which number does the mean of `hard` go as K grows? (p is still 0.9)
HARD_GOES_TO = ...
