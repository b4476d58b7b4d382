"""--logger, with the real packages, offline."""

import json
import sqlite3
import time

from conftest import call_of, launch, metrics, slow
from run import read_args, start_logger

import pytest


@slow
def test_a_run_is_logged_with_its_settings_and_goes_on_in_its_log(tiny, tmp_path):
    pytest.importorskip("trackio")
    run = tmp_path / "run"
    launch(*call_of("train_sft.py", tiny, run), "--logger", "trackio", "--max_steps", "2")
    launch("train_sft.py", "--resume", run, "--max_steps", "4")
    database = sqlite3.connect(run / "trackio" / "osw-ft.db")
    [(name, config)] = database.execute("SELECT run_name, config FROM configs").fetchall()
    record = read_args(run)
    assert name == record["run_id"] and record["args"].items() <= json.loads(config).items()
    rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    for (step, values), row in zip(rows, metrics(run), strict=True):
        assert {**json.loads(values), "step": step}.items() >= row.items()


def test_wandb_takes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = start_logger("wandb", tmp_path, "0a1b2c3d", {"seed": 7})
    logger.log({"grad_norm": 1.0}, step=1)
    logger.finish()
    [log] = tmp_path.glob("wandb/offline-run-*/run-0a1b2c3d.wandb")
    deadline = time.monotonic() + 60  # its own process writes the file, also after `finish`
    while b"grad_norm" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_bytes()
        time.sleep(0.1)
