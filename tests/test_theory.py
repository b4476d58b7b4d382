"""The paper's theory, as far as the weights and the loss of the code decide it (docs/theory.md)."""

import itertools

from train_oswft import control_weights, oswft_loss, oswft_weights

import pytest
import torch


def enumerate_rollouts(k: int, p: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """All outcomes of K rollouts (2^K, K), and how probable each is (2^K,)."""
    rewards = torch.tensor(list(itertools.product([0, 1], repeat=k)))
    right = rewards.sum(dim=1).double()
    return rewards, p**right * (1 - p) ** (k - right)


def solution() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters, log-probabilities and mask (1, 4) of an expert solution, and its g0 (20,)."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(1, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(5, (1, 4, 1), generator=generator)
    logprobs = theta.log_softmax(-1).gather(-1, tokens)[..., 0]
    mask = torch.tensor([[False, True, True, True]])
    (g0,) = torch.autograd.grad(logprobs[mask].sum(), theta, retain_graph=True)
    return theta, logprobs, mask, g0.flatten()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_update_is_unbiased_and_has_the_moments_of_the_paper(k):
    theta, logprobs, mask, g0 = solution()
    rewards, _ = enumerate_rollouts(k)
    losses = [oswft_loss(logprobs, mask, w, 1) for w in oswft_weights(rewards)[:, None]]
    rows = [-torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten() for loss in losses]
    updates, square = torch.stack(rows), g0.square().sum()
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        _, probability = enumerate_rollouts(k, p)
        torch.testing.assert_close(probability @ updates, (1 - p) * g0, rtol=1e-6, atol=1e-7)
        error = probability @ (updates - (1 - p) * g0).square().sum(dim=1) / square
        assert error.item() == pytest.approx(p * (1 - p) / k, abs=1e-6)
        lost = probability[updates.norm(dim=1) == 0].sum().item()
        hard = (probability @ control_weights(rewards, "hard").double()).item()
        assert (lost, hard) == (pytest.approx(p**k), pytest.approx(1 - p**k))


def test_no_gradient_flows_through_the_weight():
    theta, logprobs, mask, g0 = solution()
    p = logprobs[mask].sum().exp()  # only the expert's own answer is right
    loss = oswft_loss(logprobs, mask, oswft_weights(p[None, None]), 1)
    (ours,) = torch.autograd.grad(-loss, theta)
    torch.testing.assert_close(ours.flatten(), (1 - p) * g0, rtol=1e-6, atol=1e-7)
