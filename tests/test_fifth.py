"""Arm C of the fifth study (paper/yoked.py)."""

from pathlib import Path
from types import SimpleNamespace

from conftest import call_of, launch, metrics, needs_vllm, rollouts, slow
from data import InputError, read_rows
from paper.yoked import logged_weights

import pytest


@slow
@needs_vllm
def test_arm_c_has_b_s_weights_and_batches_and_in_its_own_order_b_s_steps(tiny, tmp_path):
    flags = ("--max_steps", 3, "--train_batch_size", 24, "--save_every", 10)
    launch(*call_of("train_oswft.py", tiny, tmp_path / "B"), *flags, "--rollout_batch_size", 24)
    _, *call = call_of("train_sft.py", tiny, tmp_path / "C")
    for order in ("own", "dealt"):
        yoked = ("--weights_of", tmp_path / "B", "--order", order, "--output_dir", tmp_path / order)
        launch("-m", "paper.yoked", *call, *flags, *yoked)
    moved = 0
    for step in (1, 2, 3):
        weights = {row["id"]: row["weight"] for row in rollouts(tmp_path / "B", step)}
        path = Path("weights") / f"step_{step:06d}.jsonl"
        own, dealt = (
            {row["id"]: row["weight"] for _, row in read_rows(str(tmp_path / order / path))}
            for order in ("own", "dealt")
        )
        assert own == weights and [*dealt] == [*weights]
        assert sorted(dealt.values()) == sorted(weights.values())
        moved += dealt != weights
    assert moved == 3
    final = "final/model.safetensors"
    assert (tmp_path / "own" / final).read_bytes() == (tmp_path / "B" / final).read_bytes()
    assert (tmp_path / "dealt" / final).read_bytes() != (tmp_path / "B" / final).read_bytes()
    for ours, theirs in zip(metrics(tmp_path / "dealt"), metrics(tmp_path / "B"), strict=True):
        for name in ("mean_weight", "skipped_sequences"):
            assert ours[name] == theirs[name]
    others = [SimpleNamespace(id=id) for id in reversed(weights)]
    with pytest.raises(InputError, match="is of another batch"):
        logged_weights(tmp_path / "B", step, others)
