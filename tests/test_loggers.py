"""--logger wandb, with the real package, offline."""

import time

from run import start_logger

import pytest


def test_wandb_takes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = start_logger(tmp_path, "0a1b2c3d", {"seed": 7})
    logger.log({"grad_norm": 1.0}, step=1)
    logger.finish()
    [log] = tmp_path.glob("wandb/offline-run-*/run-0a1b2c3d.wandb")
    deadline = time.monotonic() + 60  # its own process writes the file, also after `finish`
    while b"grad_norm" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_bytes()
        time.sleep(0.1)
