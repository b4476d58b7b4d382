"""Exercise 7: a weighting of your own.

The weight 1 - p is largest for questions that are never solved. But some of those are far too hard,
and some have a wrong answer in the data. You may want a weight that is largest where the model is
undecided: p (1 - p), which is 0 at both ends. Only, nobody knows p: all you have are K answers.

Task: write `undecided_weights`. Its mean over all outcomes must be p (1 - p), whatever p is.
Hint: try p̂ (1 - p̂) first, and let the grader tell you its mean. By which factor is that off?
"""

import torch


def undecided_weights(rewards: torch.Tensor) -> torch.Tensor:
    """A weight whose expectation is p (1 - p) for every p, for any K of at least 2.

    It uses all K answers, and their order does not matter.

    Args:
        rewards: (B, K) floats, 1 for a right answer, 0 for a wrong one.

    Returns:
        (B,) weights.
    """
    raise NotImplementedError("write `undecided_weights`")


# K = 2. In which of these may you just put p̂ in the place of p, and the mean is right?
#   "A"  1 - p    "B"  (1 - p)^2    "C"  p (1 - p)    "D"  all of them
PLUG_IN_IS_RIGHT = ...

# Which values can `undecided_weights` take at K = 2? A list, from the smallest to the largest
WEIGHTS_AT_K2 = ...
