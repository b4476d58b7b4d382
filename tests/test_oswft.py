"""The method itself: weights, loss, and what the paper claims about the estimator."""

import itertools

import pytest
import torch

from train_oswft import oswft_loss, oswft_weights


def test_weight_is_the_share_of_wrong_answers():
    rewards = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert oswft_weights(rewards).tolist() == [0.0, 0.5, 0.75, 1.0]
    assert oswft_weights(rewards.bool()).tolist() == [0.0, 0.5, 0.75, 1.0]


def test_with_one_rollout_the_weight_is_hard_example_selection():
    assert oswft_weights(torch.tensor([[1.0], [0.0]])).tolist() == [0.0, 1.0]


def test_no_gradient_flows_through_the_weight():
    rewards = torch.tensor([[0.3, 0.9]], requires_grad=True)
    assert not oswft_weights(rewards).requires_grad


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="soft"):
        oswft_weights(torch.ones(1, 2), strategy="soft")


def test_loss_equals_numbers_worked_out_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [-0.5, -3.0, -9.0]])
    mask = torch.tensor([[True, True, False], [False, True, False]])
    weights = torch.tensor([0.5, 1.0])
    # 0.5 * (1 + 2) + 1.0 * 3 = 4.5; three completion tokens, two queries
    assert oswft_loss(logprobs, mask, weights, 3).item() == pytest.approx(1.5)
    assert oswft_loss(logprobs, mask, weights, 2).item() == pytest.approx(2.25)


def test_weight_one_gives_the_token_mean_of_standard_sft():
    logits = torch.randn(4, 6, 11)
    targets = torch.randint(11, (4, 6))
    mask = torch.rand(4, 6) > 0.4
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    sft = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    loss = oswft_loss(logprobs, mask, torch.ones(4), mask.sum().item())
    torch.testing.assert_close(loss, sft)


def test_gradient_equals_autograd_of_the_dense_formula():
    torch.manual_seed(0)
    theta = torch.randn(5, 7, 13, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, (5, 7))
    mask = torch.rand(5, 7) > 0.3
    weights = torch.tensor([0, 0.5, 1, 0.25, 0], dtype=torch.float64)
    logprobs = theta.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    (ours,) = torch.autograd.grad(oswft_loss(logprobs, mask, weights, 9.0), theta)
    # d(-w log p_t / n) / d theta_v = w / n * (p_v - [v = t])
    onehot = torch.nn.functional.one_hot(targets, 13)
    dense = (theta.softmax(-1) - onehot) * (weights[:, None] * mask / 9.0)[..., None]
    torch.testing.assert_close(ours, dense)


def test_loss_is_the_sum_over_any_split_of_the_batch():
    torch.manual_seed(0)
    logprobs, mask, weights = -torch.rand(8, 5), torch.rand(8, 5) > 0.5, torch.rand(8)
    whole = oswft_loss(logprobs, mask, weights, 17)
    for split in ([1] * 8, [3, 5], [2, 2, 4], [7, 1]):
        order = torch.randperm(8)
        parts = [oswft_loss(logprobs[i], mask[i], weights[i], 17) for i in order.split(split)]
        torch.testing.assert_close(sum(parts), whole)


def test_masked_positions_have_no_gradient_and_no_value():
    logprobs = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    loss = oswft_loss(logprobs, torch.tensor([[True, False, True]]), torch.ones(1), 2)
    loss.backward()
    assert logprobs.grad.tolist() == [[-0.5, 0.0, -0.5]]


@pytest.mark.parametrize("num_rollouts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_estimator_is_unbiased_and_loses_its_signal_with_probability_p_to_the_k(num_rollouts, p):
    """Theorem 1 and its proof, by enumeration of all outcomes of K rollouts."""
    g0 = torch.tensor([2.0, -3.0], dtype=torch.float64)
    outcomes = torch.tensor(list(itertools.product([0, 1], repeat=num_rollouts)))  # (2^K, K)
    right = outcomes.sum(1)
    probability = p ** right.double() * (1 - p) ** (num_rollouts - right).double()
    weights = oswft_weights(outcomes).double()
    assert probability.sum().item() == pytest.approx(1)
    mean = (probability[:, None] * weights[:, None] * g0).sum(0)
    torch.testing.assert_close(mean, (1 - p) * g0)
    assert probability[weights == 0].sum().item() == pytest.approx(p**num_rollouts)
    # the second moment of the paper's remark, (1-p)^2 + p(1-p)/K
    second = (probability * weights**2).sum().item()
    assert second == pytest.approx((1 - p) ** 2 + p * (1 - p) / num_rollouts)
