"""Exercise 5: where did the end of turn go?

A solution ends with a token that says "I am done". Shorter rows of a batch are filled up with a
padding token, which must not be learnt. Many models have no padding token, so the end of turn is
used for both. Then "learn all that is not padding" forgets how to stop.

Task: write `mask_by_position`, then answer the questions. The grader trains a tiny model with each
mask, and shows how its answers end.
Hint: `torch.arange(T)` gives the positions; compare it with lengths of shape (B, 1).
"""

import torch

END = PAD = 2  # <|im_end|>


def mask_by_pad_id(tokens: torch.Tensor, prompt_lengths: torch.Tensor) -> torch.Tensor:
    """The usual way: true on all that follows the prompt and is not PAD."""
    return (torch.arange(tokens.shape[1]) >= prompt_lengths[:, None]) & (tokens != PAD)


def mask_by_position(
    tokens: torch.Tensor, prompt_lengths: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """True on the tokens of the solutions, the end of turn included, whatever their ids are.

    Args:
        tokens: (B, T) prompt, solution, padding.
        prompt_lengths: (B,) tokens of the prompts.
        lengths: (B,) tokens of prompt and solution together, with the end of turn.

    Returns:
        (B, T) booleans.

    >>> tokens = torch.tensor([[7, 5, 6, END, PAD], [7, 8, 5, 6, END]])
    >>> mask_by_position(tokens, torch.tensor([1, 2]), torch.tensor([4, 5])).int()
    tensor([[0, 1, 1, 1, 0],
            [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    positions = torch.arange(tokens.shape[1])
    return (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])


# How many of the two ends of turn in this example does `mask_by_pad_id` learn?
ENDS_LEARNT = 0

# A model that was trained with it answers a question that it knows. What does it write?
#   "A"  the solution, and stops    "B"  the solution, and goes on    "C"  the end of turn at once
IT_WRITES = "B"
# Nothing was ever learnt at the place where the solution is over, so what comes there is chance.
# Every answer runs on to the token limit, which costs time, and is then cut off. (This model was
# trained from scratch. A model that could stop before may forget it.)
