"""The method itself: weights, loss, and what the paper claims about the estimator."""

from train_grpo import grpo_loss
from train_oswft import control_weights, oswft_loss, oswft_weights
from train_sft import sft_loss

import pytest
import torch

EDGE_CASES = {  # rewards (B, K) -> the weights of OSW-FT and of hard-thresholding
    "all right": (torch.ones(4, 2), [0, 0, 0, 0], [0, 0, 0, 0]),
    "all wrong": (torch.zeros(4, 2), [1, 1, 1, 1], [1, 1, 1, 1]),
    "mixed": (torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0]]), [0, 0.5, 0.5, 1], [0, 1, 1, 1]),
    "K=1": (torch.tensor([[1], [0], [1]]), [0, 1, 0], [0, 1, 0]),
    "truth values": (torch.tensor([[True] * 3, [True, False, False]]), [0, 2 / 3], [0, 1]),
    "one query": (torch.tensor([[1, 0, 0, 0]]), [0.75], [1]),
}


@pytest.mark.parametrize("case", EDGE_CASES)
def test_weightings_on_edge_cases(case):
    rewards, oswft, hard = EDGE_CASES[case]
    assert oswft_weights(rewards).tolist() == pytest.approx(oswft)
    assert control_weights(rewards, "hard").tolist() == hard
    random = control_weights(rewards, "random")
    assert random.shape == (len(rewards),)
    assert random.mean().item() == pytest.approx(sum(oswft) / len(oswft), abs=1e-6)


@pytest.mark.parametrize("wrong", range(0, 129, 8))
def test_random_weights_are_uniform_around_the_mean_of_osw_ft_and_within_0_and_1(wrong):
    rewards = (torch.arange(128) >= wrong).float()[:, None]
    mean = wrong / 128
    weights = control_weights(rewards, "random", torch.Generator().manual_seed(0))
    assert weights.mean().item() == pytest.approx(mean, abs=1e-6)
    assert weights.min() >= 0 and weights.max() <= 1
    # a uniform distribution of the largest spread that this mean allows
    spread = min(mean, 1 - mean)
    quantiles = weights.sort().values
    expected = torch.linspace(mean - spread, mean + spread, 128)
    torch.testing.assert_close(quantiles, expected, rtol=0, atol=0.01)


def test_random_weights_have_nothing_to_do_with_the_answers():
    rewards = (torch.arange(128) >= 50).float()[:, None]
    correlations = [
        torch.corrcoef(torch.stack([rewards[:, 0], control_weights(rewards, "random")]))[0, 1]
        for _ in range(400)
    ]
    assert abs(torch.stack(correlations).mean().item()) < 4 / (128 * 400) ** 0.5


def test_random_weights_follow_their_generator_and_leave_the_global_one_alone():
    rewards = torch.tensor([[0.0, 1.0]] * 16)
    draws = [
        control_weights(rewards, "random", torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    state = torch.get_rng_state()
    control_weights(rewards, "random", torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_strategy_and_weights_that_broadcast_or_have_a_gradient_are_refused():
    with pytest.raises(ValueError):
        control_weights(torch.ones(1, 2), strategy="soft")
    rows_end_to_end = torch.full((1, 6), -1.0)
    for weights in (torch.ones(2), torch.ones(1, 1), torch.ones(1, requires_grad=True)):
        for loss in (oswft_loss, sft_loss):
            with pytest.raises(AssertionError):
                loss(rows_end_to_end, torch.ones(1, 6), weights, 6)


def test_loss_equals_numbers_worked_out_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [-0.5, -3.0, -9.0]])
    mask = torch.tensor([[True, True, False], [False, True, False]])
    weights = torch.tensor([0.5, 1.0])
    # 0.5 * (1 + 2) + 1.0 * 3 = 4.5; three completion tokens, two queries
    assert oswft_loss(logprobs, mask, weights, 3).item() == pytest.approx(1.5)
    assert oswft_loss(logprobs, mask, weights, 2).item() == pytest.approx(2.25)


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


LOSSES = {  # each script's, of (log-probabilities, mask, a weight for each row, normalizer)
    "sft": lambda logprobs, mask, weights, n: sft_loss(logprobs, mask, weights, n),
    "oswft": oswft_loss,
    "grpo": lambda x, mask, weights, n: grpo_loss(x, x.detach() - 0.1, weights, mask, n),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_is_the_sum_over_any_split_of_the_batch(loss):
    torch.manual_seed(0)
    logprobs, mask, weights = -torch.rand(8, 5), torch.rand(8, 5) > 0.5, torch.rand(8)
    for split in ([1] * 8, [3, 5], [2, 2, 4], [7, 1]):
        order = torch.randperm(8)
        parts = [loss(logprobs[i], mask[i], weights[i], 17) for i in order.split(split)]
        torch.testing.assert_close(sum(parts), loss(logprobs, mask, weights, 17))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_masked_positions_have_no_gradient_and_no_value(loss):
    logprobs = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    value = loss(logprobs, torch.tensor([[True, False, True]]), torch.ones(1), 2)
    value.backward()
    assert value.isfinite() and logprobs.grad[0, 1] == 0 and all(logprobs.grad[0, ::2] < 0)
