"""Exercise 2: what is the loss divided by?

A solution's loss is the sum of -log p over its tokens, times the solution's weight. These are added
up over the batch and divided by the number of the solutions' tokens, whatever their weights. A
weighted mean would divide by the sum of the weights instead. It looks as natural, and it throws
part of the method away.

Task: write both losses, then answer the questions below them. Try to answer before you compute.
Hint: only the last division differs. Every token of a solution has the solution's weight.
"""

import torch


def loss_by_tokens(
    logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """- sum of weight * log p over the solutions' tokens / number of these tokens.

    Args:
        logprobs: (B, T) log p of each token.
        mask: (B, T), floats: 1 on the solutions' tokens, 0 on prompt and padding.
        weights: (B,) of the solutions. Tokens of weight 0 are counted, too.

    Returns:
        one number, as a tensor through which the gradient flows to `logprobs`.
    """
    raise NotImplementedError("write `loss_by_tokens`")


def loss_by_weights(
    logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same sum / the sum of these tokens' weights."""
    raise NotImplementedError("write `loss_by_weights`")


# The model gets better: each weight of a batch falls to a tenth of what it was.
# How many times as large is the gradient then? (1.0: as large as before)
FACTOR_BY_TOKENS = ...
FACTOR_BY_WEIGHTS = ...

# So what vanishes if the loss is divided by the sum of the weights?
#   "A"  which solutions count more than others
#   "B"  how large the weights are on average: a batch that is nearly mastered counts like a new one
#   "C"  both
VANISHES = ...

# And if each solution is a batch of its own (its weight not 0), divided by its own sum?
# "A", "B" or "C"
VANISHES_ONE_BY_ONE = ...
