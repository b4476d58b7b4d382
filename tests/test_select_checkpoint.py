"""Which checkpoint of a GRPO run is evaluated: the beginning of the reward's plateau."""

import math

from data import InputError, write_rows
from paper.select_checkpoint import select_checkpoint, select_step

import pytest

CHECKPOINTS = range(10, 101, 10)


def rising(step: int) -> float:
    """To 0.7 within 60 steps, flat from there on."""
    return 0.2 + 0.5 * min(step, 60) / 60


def test_the_beginning_of_the_plateau_is_selected_before_a_collapse_and_where_rows_are_known():
    curve = [rising(n) for n in range(100)]
    lucky = [*curve[:19], 1.0, *curve[20:]]  # a single batch is not a plateau
    slowly_worse = [rising(n) - 0.005 * max(0, n - 60) for n in range(100)]
    assert [select_step(each, CHECKPOINTS) for each in (lucky, slowly_worse)] == [60, 60]
    assert select_step([0.7] * 20, [3, 10]) == 3  # fewer rows before it than after it
    assert select_step([0.001 * n for n in range(100)], CHECKPOINTS) == 80  # 0.0175 below the best
    assert select_step([*curve[:55], math.nan, *curve[56:]], CHECKPOINTS) == 70


def test_the_folder_of_the_checkpoint_is_found_in_a_run_of_grpo_alone(tmp_path):
    for step in (5, 15, 20):
        (tmp_path / f"checkpoint-{step:06d}").mkdir()
    rewards = [0.1] * 10 + [0.8] * 10
    rows = [{"step": n, "reward": reward} for n, reward in enumerate(rewards, start=1)]
    for lost, chosen in ((0, 15), (11, 20)):  # so many rows at the beginning
        write_rows(rows[lost:], tmp_path / "metrics.jsonl")
        assert select_checkpoint(tmp_path) == tmp_path / f"checkpoint-{chosen:06d}"
    refused = {"lacks rows around each checkpoint": rows[16:], "not a run of GRPO": [{"step": 1}]}
    for reason, own in refused.items():
        write_rows(own, tmp_path / "metrics.jsonl")
        with pytest.raises(InputError, match=reason):
            select_checkpoint(tmp_path)
