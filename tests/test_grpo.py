"""GRPO itself: advantages, loss, gradient."""

import math

from train_grpo import grpo_advantages, grpo_loss

import pytest
import torch


def test_advantages_are_normalised_within_each_group():
    rewards = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0]])
    advantages = grpo_advantages(rewards)
    for row, answers in zip(advantages.tolist(), rewards.tolist(), strict=True):
        mean = sum(answers) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in answers) / 3)
        assert row == pytest.approx([(r - mean) / std for r in answers], abs=1e-5)
    torch.testing.assert_close(grpo_advantages(rewards.bool()), advantages)


@pytest.mark.parametrize("group", [2, 3, 8])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 1 / 3])  # the mean of eight 0.7 is not 0.7
def test_a_group_of_equal_rewards_has_no_advantage_at_all(group, reward):
    assert grpo_advantages(torch.full((3, group), reward)).tolist() == [[0.0] * group] * 3


def test_no_gradient_flows_through_the_advantages():
    assert not grpo_advantages(torch.rand(2, 4, requires_grad=True)).requires_grad


def random_case():
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(6, 9, 13, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(13, (6, 9), generator=generator)
    mask = torch.rand(6, 9, generator=generator) > 0.3
    logprobs = theta.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    old = logprobs.detach() + 0.4 * torch.randn(6, 9, generator=generator)
    advantages = torch.tensor([1.5, -0.5, 0.0, 2.0, -1.0, -2.0], dtype=torch.float64)
    return theta, logprobs, old, advantages, mask


def test_loss_and_gradient_equal_a_reference_written_token_by_token():
    theta, logprobs, old, advantages, mask = random_case()
    ours = grpo_loss(logprobs, old, advantages, mask, 31.0)
    reference, cases = torch.zeros((), dtype=torch.float64), set()
    for n in range(6):
        for t in range(9):
            if mask[n, t]:
                ratio = (logprobs[n, t] - old[n, t]).exp()
                clipped = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.28))
                reference = reference + min(ratio * advantages[n], clipped * advantages[n]) / 31.0
                cases.add((advantages[n].sign().item(), bool(ratio < 0.8), bool(ratio > 1.28)))
    assert sum(sign != 0 for sign, *_ in cases) == 6  # each within, below and above the bounds
    torch.testing.assert_close(ours, -reference)
    (gradient,) = torch.autograd.grad(ours, theta, retain_graph=True)
    (expected,) = torch.autograd.grad(-reference, theta)
    torch.testing.assert_close(gradient, expected)


def test_before_any_update_the_gradient_is_the_plain_policy_gradient():
    theta, logprobs, _, advantages, mask = random_case()
    loss = grpo_loss(logprobs, logprobs.detach(), advantages, mask, 31.0)
    (ours,) = torch.autograd.grad(loss, theta, retain_graph=True)
    policy_gradient = -(advantages[:, None] * mask * logprobs).sum() / 31.0
    torch.testing.assert_close(ours, torch.autograd.grad(policy_gradient, theta)[0])
