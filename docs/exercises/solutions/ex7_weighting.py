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
        rewards: (B, K), 1 for a right answer, 0 for a wrong one.

    Returns:
        (B,) weights.
    """
    k = rewards.shape[1]
    p_hat = rewards.float().mean(dim=1)
    return k / (k - 1) * p_hat * (1 - p_hat)  # also: rewards.float().var(dim=1)


# K = 2. In which of these may you just put p̂ in the place of p, and the mean is right?
#   "A"  1 - p    "B"  (1 - p)^2    "C"  p (1 - p)    "D"  all of them
PLUG_IN_IS_RIGHT = "A"
# The mean of p̂ is p, so all that is linear in p̂ is right on average. The mean of p̂^2 is not p^2 but
# p^2 + p (1 - p) / K. That is why p̂ (1 - p̂) is on average only (K - 1) / K of p (1 - p).

# Which values can `undecided_weights` take at K = 2? A list, from the smallest to the largest
WEIGHTS_AT_K2 = [0.0, 0.5]
# 1/2 if the answers differ, else 0. One answer cannot differ from itself: with K = 1 there is no
# such weight. How to train with one like it: recipes/patches.md, "Weighting".
