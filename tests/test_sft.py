"""SFT itself: its loss, and weights from the data."""

import run
import train_sft
from conftest import metrics
from data import Example, InputError, TokenizedExample, collate, read_rows, write_rows
from train_oswft import oswft_loss
from train_sft import Args, get_weights, sft_loss, update

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


def weighted(weight) -> TokenizedExample:
    example = Example("id", "1", "1", "1", "s", {"w": weight}, "rows.jsonl:1")
    return TokenizedExample("id", [1, 2], [3, 4], example)


def test_weights_from_the_data_give_the_loss_of_osw_ft_and_weight_0_costs_no_pass(tiny_engine):
    rows = [weighted(w) for w in (0.5, 0, 1.0)]
    weights = get_weights(rows, "w")
    assert weights.tolist() == [0.5, 0, 1]
    logprobs, mask = tiny_engine.eval_logprobs(rows), collate(rows, range(3)).mask
    args = Args(model="", data="", learning_rate=0.0, weight_column="w")
    stats = update(tiny_engine, rows, weights, args)
    assert stats["loss"] == pytest.approx(oswft_loss(logprobs, mask, weights, 6).item())
    assert stats["mean_weight"] == 0.5 and stats["skipped_sequences"] == 1


def test_a_run_takes_its_weights_from_a_column(tiny, tmp_path, one_rank, monkeypatch):
    rows = [row for _, row in read_rows(str(tiny / "train.jsonl"))][:16]
    write_rows([{**row, "w": n % 2 / 2} for n, row in enumerate(rows)], tmp_path / "rows.jsonl")
    monkeypatch.setattr(train_sft, "init_training", lambda: None)
    monkeypatch.setattr(run, "STOP_SIGNALS", ())  # pytest's own handlers stay
    paths = {"model": str(tiny / "model"), "data": str(tmp_path / "rows.jsonl")}
    lengths = {"max_length": 128, "max_completion_length": 48, "output_dir": str(tmp_path / "run")}
    args = Args(**paths, **lengths, weight_column="w", train_batch_size=8)
    assert train_sft.main(args) == 0
    first, second = metrics(tmp_path / "run")
    assert first["mean_weight"] + second["mean_weight"] == 2 * 0.25
    assert first["skipped_sequences"] + second["skipped_sequences"] == 8


@pytest.mark.parametrize("weight", [-0.5, "1", None, True, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_with_its_row(weight):
    with pytest.raises(InputError, match=r"rows\.jsonl:1"):
        get_weights([weighted(weight)], "w")
