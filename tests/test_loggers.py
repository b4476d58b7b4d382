"""--logger wandb, with the real package, offline."""

from run import start_wandb

import pytest


def test_wandb_takes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = start_wandb(tmp_path, "0a1b2c3d", {"seed": 7})
    assert logger.config["seed"] == 7 and logger.run.project == "osw-ft"
    logger.log({"grad_norm": 1.0}, step=1)
    logger.finish()
    assert [*tmp_path.glob("wandb/offline-run-*-0a1b2c3d")]
