"""--logger, with the real packages, offline."""

import json
import os
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

from conftest import ROOT, call_of, launch, metrics, output_of, run_alone, slow
from data import InputError
from run import read_args, start_logger

import pytest

START = """
import os, signal, sys, time
from pathlib import Path
from run import start_logger

name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logger = start_logger(name, Path("."), "0a1b2c3d", {"seed": 7})
for step in range(first, last + 1):
    logger.log({"loss": 1 / step}, step=step)
time.sleep(1)  # as long as trackio may keep a row back
if last == 4:
    os.kill(os.getpid(), signal.SIGKILL)
logger.finish()
"""


def read_wandb(folder: Path) -> tuple[str, dict, list[tuple[int, dict]]]:
    """(run id, config, steps) of the newest start: offline, each has a folder of its own."""
    newest = sorted(folder.glob("wandb/offline-run-*"))[-1]
    shown = output_of("-m", "wandb", "leet", "inspect", "--json", newest)
    records = [json.loads(line) for line in shown.splitlines()]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return run["run_id"], run["config"]["update"], [(row.pop("_step"), row) for row in rows]


def read_trackio(folder: Path) -> tuple[str, dict, list[tuple[int, dict]]]:
    database = sqlite3.connect(folder / "trackio" / "osw-ft.db")
    rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    ((name, config),) = database.execute("SELECT run_name, config FROM configs").fetchall()
    return name, json.loads(config), [(step, json.loads(values)) for step, values in rows]


@slow
@pytest.mark.parametrize(
    ("name", "read", "steps"),
    [("wandb", read_wandb, [5, 6]), ("trackio", read_trackio, [1, 2, 3, 4, 5, 6])],
)
def test_a_killed_and_resumed_run_is_one_run_of_the_tracker(name, read, steps, tmp_path):
    pytest.importorskip(name)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    for first, last, status in ((1, 4, -9), (5, 6, 0)):
        done = run_alone("-c", START, name, first, last, cwd=tmp_path, env=env)
        assert done.returncode == status, done.stderr
    run_id, config, rows = read(tmp_path)
    assert run_id == "0a1b2c3d" and config["seed"] == 7
    assert [step for step, _ in rows] == steps
    assert all(values["loss"] == pytest.approx(1 / step) for step, values in rows)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_logger_that_cannot_start_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: 1 / 0))
    with pytest.raises(InputError, match="--logger wandb: division by zero"):
        start_logger("wandb", tmp_path, "0a1b2c3d", {})


@slow
def test_a_training_run_is_logged_with_its_settings_and_continues(tiny, tmp_path):
    pytest.importorskip("trackio")
    run = tmp_path / "run"
    launch(*call_of("train_sft.py", tiny, run), "--logger", "trackio", "--max_steps", "2")
    launch("train_sft.py", "--resume", run, "--max_steps", "4")
    name, config, rows = read_trackio(run)
    record = read_args(run)
    assert name == record["run_id"] and record["args"].items() <= config.items()
    for (step, values), row in zip(rows, metrics(run), strict=True):
        assert {**values, "step": step}.items() >= row.items()
