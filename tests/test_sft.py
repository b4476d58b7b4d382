"""SFT itself: its loss, and weights from the data."""

from data import Example, InputError, TokenizedExample, Trajectory, collate
from train_oswft import oswft_loss
from train_sft import Args, get_weight, sft_loss, update

import pytest
import torch


def test_the_loss_is_the_mean_cross_entropy_of_the_solutions_tokens():
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(4, 6, 11, dtype=torch.float64, generator=generator)
    tokens = torch.randint(11, (4, 6), generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.4
    logprobs = theta.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ours = sft_loss(logprobs, mask, torch.ones(len(mask)), mask.sum().item())
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(theta[mask], tokens[mask]))


class Recorder:
    """Stands in for the engine: one micro-batch of what is kept, with these log-probabilities."""

    def __init__(self, logprobs):
        self.all_logprobs, self.loss = logprobs, 0.0

    def micro_batches(self, rows, keep):
        self.kept = keep.tolist()
        yield collate(rows, keep.nonzero()[:, 0].tolist())

    def logprobs(self, batch):
        return self.all_logprobs[batch.rows]

    def backward(self, loss):
        self.loss += loss

    def step(self, learning_rate):
        assert learning_rate == Args.learning_rate
        return {"loss": self.loss}

    device = torch.device("cpu")


def test_a_step_takes_the_loss_over_all_completion_tokens():
    logprobs = -torch.rand(2, 3)
    row = Trajectory("id", [1, 2], [3, 4])
    stats = update(engine := Recorder(logprobs), [row, row], Args.learning_rate)
    mask = torch.tensor([[False, True, True]] * 2)
    torch.testing.assert_close(stats["loss"], sft_loss(logprobs, mask, torch.ones(len(mask)), 4))
    assert engine.kept == [True, True] and "mean_weight" not in stats


def weighted(weight) -> TokenizedExample:
    example = Example("id", "1", "1", "1", "s", {"w": weight}, "rows.jsonl:1")
    return TokenizedExample("id", [1, 2], [3, 4], example)


def test_weights_from_the_data_give_the_loss_of_osw_ft_and_weight_0_costs_no_pass():
    logprobs, weights = -torch.rand(3, 3), torch.tensor([0.5, 0.0, 1.0])
    stats = update(
        engine := Recorder(logprobs), [weighted(w) for w in (0.5, 0, 1.0)], Args.learning_rate, "w"
    )
    mask = torch.tensor([[False, True, True]] * 3)
    torch.testing.assert_close(stats["loss"], oswft_loss(logprobs, mask, weights, 6))
    assert engine.kept == [True, False, True] and stats["mean_weight"] == 0.5


@pytest.mark.parametrize("weight", [-0.5, "1", None, True, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_with_its_row(weight):
    with pytest.raises(InputError, match=r"rows\.jsonl:1"):
        get_weight(weighted(weight), "w")
