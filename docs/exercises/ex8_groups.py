"""Exercise 8: learning from one's own answers.

GRPO has no expert. It samples G answers to a question and compares them with each other: those that
are better than the group's mean are reinforced, the others suppressed. This needs a group whose
answers differ. If all are right or all are wrong, there is nothing to compare.

Task: write `grpo_advantages` and `no_signal`, then compare GRPO with OSW-FT on a hard question.
Hint: 0 / 0 is not 0. A small number in the divisor, 1e-6, helps.
"""

import torch


def grpo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """A = (r - mean) / std of the answers to the same question; 0 where all of them are alike.

    Args:
        rewards: (B, G) floats, 1 for a right answer, 0 for a wrong one; G is at least 2.

    Returns:
        (B, G) advantages. The std is that of a sample: it divides by G - 1.

    >>> grpo_advantages(torch.tensor([[1., 0., 0.], [1., 1., 1.]]))
    tensor([[ 1.1547, -0.5773, -0.5773],
            [ 0.0000,  0.0000,  0.0000]])
    """
    raise NotImplementedError("write `grpo_advantages`")


def no_signal(p: float, g: int) -> float:
    """How probable it is that all advantages of a group of g are 0.

    Args:
        p: how probable it is that an answer is right; the answers are independent.
    """
    raise NotImplementedError("write `no_signal`")


# A hard question: one answer in a hundred is right. How probable is it that nothing is learnt
# from it?
GRPO_G8 = ...  # with a group of 8 answers; rounded to two decimals, or more
OSWFT_K2 = ...  # with OSW-FT's weight from 2 answers; to four decimals

# All sampled answers to a question are wrong. What is then ...
WEIGHT = ...  # OSW-FT's weight of its solution?
ADVANTAGE = ...  # GRPO's advantage of each answer?
