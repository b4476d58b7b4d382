"""Exercise 1: how much does each expert solution count?

A model learns from an expert's solutions to questions. First it answers each question K times by
itself, and each answer is checked. The solution then counts by the share of answers that are wrong.
What the model can do already costs nothing; what it fails at is learnt in full. This method is
called OSW-FT.

Task: write `oswft_weights`, which turns verdicts on the answers into a weight for each question.
This one line is the method; the rest is a loop.
Hint: which of the two dimensions holds the answers to the same question?
"""

import torch


def oswft_weights(rewards: torch.Tensor) -> torch.Tensor:
    """w = 1 - p̂, where p̂ is the share of a question's K answers that are right.

    Args:
        rewards: (B, K), K answers to each of B questions: 1 for a right one, 0 for a wrong one.
            Verdicts may come as floats, as integers or as booleans.

    Returns:
        (B,) weights in [0, 1]: a tensor of floats, and constants: no gradient flows through them.

    >>> oswft_weights(torch.tensor([[1., 1.], [1., 0.], [0., 0.]]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    raise NotImplementedError("write `oswft_weights`")
