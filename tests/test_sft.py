"""SFT itself: its loss, and the objective that scales it by the tokens' own probability."""

import pytest
import torch

from data import Trajectory, collate
from train_oswft import oswft_loss
from train_sft import Args, sft_loss, update


def random_case():
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(4, 6, 11, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(11, (4, 6), generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.4
    return theta, tokens, mask, theta.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def test_the_loss_is_the_mean_cross_entropy_of_the_solutions_tokens():
    theta, tokens, mask, logprobs = random_case()
    ours = sft_loss(logprobs, mask, mask.sum().item())
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(theta[mask], tokens[mask]))


def test_it_is_the_loss_of_osw_ft_at_weight_one():
    _, _, mask, logprobs = random_case()
    weights = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(sft_loss(logprobs, mask, 9), oswft_loss(logprobs, mask, weights, 9))


def test_dft_scales_each_tokens_gradient_by_its_probability_which_is_held_constant():
    theta, tokens, mask, logprobs = random_case()
    (ours,) = torch.autograd.grad(sft_loss(logprobs, mask, 9.0, "dft"), theta, retain_graph=True)
    # d(-p log p_t / n) / d theta_v = p / n * (p_v - [v = t]), with p = p_t
    onehot = torch.nn.functional.one_hot(tokens, 11)
    scale = (logprobs.exp() * mask / 9.0)[..., None]
    torch.testing.assert_close(ours, (theta.softmax(-1) - onehot) * scale)


@pytest.mark.parametrize("objective", ["sft", "dft"])
def test_masked_positions_have_no_gradient_and_no_value(objective):
    logprobs = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    sft_loss(logprobs, torch.tensor([[True, False, True]]), 2, objective).backward()
    assert logprobs.grad.tolist() == [[-0.5, 0.0, -0.5]]


@pytest.mark.parametrize("objective", ["sft", "dft"])
def test_loss_is_the_sum_over_any_split_of_the_batch(objective):
    _, _, mask, logprobs = random_case()
    parts = [sft_loss(logprobs[i], mask[i], 9, objective) for i in ([0], [2, 3], [1])]
    torch.testing.assert_close(sum(parts), sft_loss(logprobs, mask, 9, objective))


@pytest.mark.parametrize("objective", ["sft", "dft"])
def test_a_step_takes_the_objective_of_the_command_line_over_all_completion_tokens(objective):
    logprobs = -torch.rand(1, 3)
    row = Trajectory("id", [1, 2], [3, 4])

    class Recorder:
        def passes(self, rows, max_tokens):
            assert max_tokens == 77
            yield collate(rows, [0])

        def logprobs(self, batch):
            return logprobs

        def backward(self, loss):
            self.loss = loss

        def step(self):
            return {"loss": self.loss}

    args = Args(model="m", data="d", objective=objective, max_tokens_per_micro_batch=77)
    stats = update(Recorder(), [row, row], args)
    mask = torch.tensor([[False, True, True]])
    torch.testing.assert_close(stats["loss"], sft_loss(logprobs, mask, 4, objective))
    assert stats["train_tokens"] == 8
