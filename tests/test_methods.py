"""The methods' pure functions: weights, advantages, losses."""

import doctest
import importlib
import math

from data import Example, InputError, Query
from train_grpo import grpo_advantages, grpo_loss
from train_oswft import control_weights, oswft_loss, oswft_weights
from train_sft import get_weights, sft_loss

import pytest
import torch

EDGE_CASES = {  # rewards (B, K) -> the weights of OSW-FT and of hard-thresholding
    "all right": (torch.ones(4, 2), [0, 0, 0, 0], [0, 0, 0, 0]),
    "all wrong": (torch.zeros(4, 2), [1, 1, 1, 1], [1, 1, 1, 1]),
    "mixed": (torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0]]), [0, 0.5, 0.5, 1], [0, 1, 1, 1]),
    "K=1": (torch.tensor([[1], [0], [1]]), [0, 1, 0], [0, 1, 0]),
    "truth values": (torch.tensor([[True] * 3, [True, False, False]]), [0, 2 / 3], [0, 1]),
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


def test_advantages_are_normalised_within_each_group():
    rewards = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0]])
    advantages = grpo_advantages(rewards)
    for row, answers in zip(advantages.tolist(), rewards.tolist(), strict=True):
        mean = sum(answers) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in answers) / 3)
        assert row == pytest.approx([(r - mean) / std for r in answers], abs=1e-5)
    torch.testing.assert_close(grpo_advantages(rewards.bool()), advantages)
    assert not grpo_advantages(torch.rand(2, 4, requires_grad=True)).requires_grad


@pytest.mark.parametrize("group", [2, 3, 8])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 1 / 3])  # the mean of eight 0.7 is not 0.7
def test_a_group_of_equal_rewards_has_no_advantage_at_all(group, reward):
    assert grpo_advantages(torch.full((3, group), reward)).tolist() == [[0.0] * group] * 3


@pytest.mark.parametrize("weight", [-0.5, "1", None, True, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_with_its_row(weight):
    example = Example("id", "1", "1", "1", "s", {"w": weight}, "rows.jsonl:1")
    with pytest.raises(InputError, match=r"rows\.jsonl:1"):
        get_weights([Query("id", [1, 2], [3, 4], example)], "w")


def test_an_unknown_strategy_and_weights_that_broadcast_or_have_a_gradient_are_refused():
    with pytest.raises(ValueError):
        control_weights(torch.ones(1, 2), strategy="soft")
    rows_end_to_end = torch.full((1, 6), -1.0)
    for weights in (torch.ones(2), torch.ones(1, 1), torch.ones(1, requires_grad=True)):
        with pytest.raises(AssertionError):
            oswft_loss(rows_end_to_end, torch.ones(1, 6), weights, 6)


LOSSES = {  # each script's, of (log-probabilities, mask, a weight for each row, normalizer)
    "sft": lambda logprobs, mask, weights, n: sft_loss(logprobs * weights[:, None], mask, n),
    "oswft": oswft_loss,
    "grpo": lambda x, mask, weights, n: grpo_loss(x, x.detach() - 0.1, weights, mask, n),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_masked_positions_have_no_gradient_and_no_value(loss):
    logprobs = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    value = loss(logprobs, torch.tensor([[True, False, True]]), torch.ones(1), 2)
    value.backward()
    assert value.isfinite() and logprobs.grad[0, 1] == 0 and all(logprobs.grad[0, ::2] < 0)


@pytest.mark.parametrize("name", ["train_oswft", "train_grpo", "data", "evaluate"])
def test_the_examples_in_docstrings_are_what_python_says(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert not failed and attempted
