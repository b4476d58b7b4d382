"""Exercise 4: how old may a weight be?

Weights come from sampled answers, and sampling is best done for many questions together. So S
batches are weighed at once, then learnt in S updates. After the first of them the model has moved
on, and the weights of the others are those of an older model: they are stale.

Task: write `weights_in_use`, then answer the questions.
Hint: with S = 4, weights are renewed at steps 0, 4 and 8. To see how wrong the weights of each step
are, put this at the end of the file, and grade it: print(train(4))
"""

import torch

torch.manual_seed(0)
FEATURES = torch.randn(12 * 32, 8)  # of 384 questions, each with four possible answers
EXPERT = (FEATURES @ torch.randn(8, 4)).argmax(dim=1)  # which of the four is right


def success(theta: torch.Tensor) -> torch.Tensor:
    """p of all questions: how probable the right answer is for a model with parameters (8, 4)."""
    return (FEATURES @ theta).softmax(dim=1)[range(len(EXPERT)), EXPERT]  # (384,)


def weights_in_use(step: int, s: int, old: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """The weights of all questions at this step: new ones at every s-th step, from step 0 on.

    A new weight is 1 - p. No tensor is changed in place.

    Args:
        old: (N,) the weights that the step before used; None at step 0.
        p: (N,) how probable the right answers are for the model as it is now.
    """
    raise NotImplementedError("write `weights_in_use`")


def train(s: int) -> list[float]:
    """Learn 32 new questions at each of 12 steps; by how much are their weights too large?"""
    theta, weights, errors = torch.zeros(8, 4, requires_grad=True), None, []
    for step in range(12):
        part = slice(32 * step, 32 * step + 32)  # this step's questions
        p = success(theta)
        weights = weights_in_use(step, s, weights, p.detach())
        errors.append((weights - (1 - p))[part].mean().item())
        loss = -(weights * p.log())[part].mean()
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta - gradient).detach().requires_grad_()
    return errors


# How many updates old are the weights that steps 0, 1, ..., 7 use with S = 4? A list of 8 numbers
AGES = ...

# While the model learns, stale weights are ...
#   "A"  too large: solutions count that are no longer needed    "B"  too small    "C"  right
STALE_WEIGHTS_ARE = ...

# Here p is known. A real run samples K answers to each question of the next S batches. Compare one
# pass over the data with S = 4 to one with S = 1: by which factor do these change? (1: not at all)
ANSWERS = ...  # the number of sampled answers
SYNCS = ...  # how often the sampler gets the model's parameters: once before each sampling
