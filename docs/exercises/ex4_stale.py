"""Exercise 4: how old may a weight be?

Weights come from sampled answers, and sampling is best done for many questions together. So S
batches are weighed at once, then learnt in S updates. After the first of them the model has moved
on, and the weights of the others are those of an older model: they are stale.

Task: write the lines that are missing in `train`, then answer the questions.
Hint: with S = 4, weights are renewed before steps 0, 4, 8. Right after that, their error is 0.
"""

import torch

torch.manual_seed(0)
FEATURES = torch.randn(12 * 32, 8)  # of 384 questions, each with four possible answers
EXPERT = (FEATURES @ torch.randn(8, 4)).argmax(dim=1)  # which of the four is right


def success(theta: torch.Tensor) -> torch.Tensor:
    """p of all questions: how probable the right answer is for a model with parameters (8, 4)."""
    return (FEATURES @ theta).softmax(dim=1)[range(len(EXPERT)), EXPERT]  # (384,)


def train(s: int, steps: int = 12) -> list[float]:
    """Each step learns 32 new questions; the weights are renewed before every s-th step.

    Returns:
        for each step, by how much its 32 weights are too large: the mean of (weight in use) -
        (1 - p), with p of the model as it is just before the step's update.
    """
    theta, weights, errors = torch.zeros(8, 4, requires_grad=True), None, []
    for step in range(steps):
        part = slice(32 * step, 32 * step + 32)  # this step's questions
        # Two things: at some steps, set `weights` to 1 - p of all questions;
        # at every step, append the error of weights[part] to `errors`.
        raise NotImplementedError("write the missing lines of `train`")
        loss = -(weights.detach() * success(theta).log())[part].mean()
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta - gradient).detach().requires_grad_()
    return errors


# How many updates old are the weights that steps 0, 1, ..., 7 use with S = 4? A list of 8 numbers
AGES = ...

# While the model learns, stale weights are ...
#   "A"  too large: solutions count that are no longer needed    "B"  too small    "C"  right
STALE_WEIGHTS_ARE = ...

# Here p is known, so all questions are weighed at once. A real run samples K answers only for the
# questions of the next S batches.
# For one pass over the data S = 4 needs, compared with S = 1, how many times as many ...
ANSWERS = ...  # sampled answers?
SYNCS = ...  # copies of the model's parameters into the sampler, one before each sampling?
