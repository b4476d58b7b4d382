"""Which checkpoint of a GRPO run is evaluated: the beginning of the reward's plateau."""

import math

from data import InputError, write_rows
from paper.select_checkpoint import select_checkpoint, select_step

import pytest
import torch

CHECKPOINTS = range(10, 101, 10)


def rising(step: int) -> float:
    """To 0.7 within 60 steps, flat from there on."""
    return 0.2 + 0.5 * min(step, 60) / 60


def test_of_a_rising_curve_the_beginning_of_the_plateau_is_selected():
    assert select_step([rising(n) for n in range(100)], CHECKPOINTS) == 60
    assert select_step([n / 100 for n in range(100)], CHECKPOINTS) == 100  # it still rises
    assert select_step([0.001 * n for n in range(100)], CHECKPOINTS) == 80  # 0.0175 below the best


def test_of_a_collapsing_curve_one_before_the_collapse_is_selected():
    collapsing = [rising(n) if n < 80 else 0.0 for n in range(100)]
    assert select_step(collapsing, CHECKPOINTS) == 60
    slowly = [rising(n) - 0.005 * max(0, n - 60) for n in range(100)]
    assert select_step(slowly, CHECKPOINTS) == 60


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_move_the_selection_off_the_plateau(seed):
    """Noise as of 128 queries x 8 answers: up to 0.03 a batch; then a collapse."""
    noise = 0.03 * torch.randn(100, generator=torch.Generator().manual_seed(seed))
    curve = [rising(n) if n < 85 else 0.1 for n in range(100)]
    noisy = [reward + e for reward, e in zip(curve, noise.tolist(), strict=True)]
    assert 50 <= select_step(noisy, CHECKPOINTS) <= 80
    spike = [*noisy[:20], 1.0, *noisy[21:]]  # a single lucky batch is not a plateau
    assert 50 <= select_step(spike, CHECKPOINTS) <= 80


def test_a_checkpoint_near_lost_rows_is_left_out():
    curve = [rising(n) for n in range(100)]
    assert select_step([*curve[:55], math.nan, *curve[56:]], CHECKPOINTS) == 70
    assert select_step([math.nan] * 100, CHECKPOINTS) is None


def test_the_folder_of_the_checkpoint_is_found_in_a_run_of_grpo_alone(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        select_checkpoint(tmp_path)
    write_rows([{"step": 1, "loss": 0.5}], tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match="is not a run of GRPO with a checkpoint"):
        select_checkpoint(tmp_path)
    rewards = [0.1] * 10 + [0.8] * 10
    rows = [{"step": n, "reward": reward} for n, reward in enumerate(rewards, start=1)]
    for step in (5, 15, 20):
        (tmp_path / f"checkpoint-{step:06d}").mkdir()
    for lost, chosen in ((0, 15), (11, 20), (16, None)):  # so many rows at the beginning
        write_rows(rows[lost:], tmp_path / "metrics.jsonl")
        if chosen:
            assert select_checkpoint(tmp_path) == tmp_path / f"checkpoint-{chosen:06d}"
    with pytest.raises(InputError, match="lacks rows around each checkpoint"):
        select_checkpoint(tmp_path)
