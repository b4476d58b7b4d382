"""--logger, with the real packages, offline: every step once, also after a kill."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT, call_of, launch, metrics
from run import Logger, read_args

START = """
import os, signal, sys, time
from pathlib import Path
from run import Logger

name, done, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = [{"step": n, "loss": 1 / n, "clipped": n % 2 == 0} for n in range(1, last + 1)]
logger = Logger(name, Path("."), "0a1b2c3d", {"seed": 7}, rows[:done])
for row in rows[done:]:
    logger.log(row)
time.sleep(1)  # as long as trackio may keep a row back
if last == 4:
    os.kill(os.getpid(), signal.SIGKILL)
logger.close()
"""


def read_wandb(folder: Path) -> tuple[str, dict, list[tuple[int, dict]]]:
    """(run id, config, steps) of the newest start."""
    newest = sorted(folder.glob("wandb/offline-run-*"))[-1]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", newest]
    lines = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return run["run_id"], run["config"]["update"], [(row.pop("_step"), row) for row in rows]


def read_trackio(folder: Path) -> tuple[str, dict, list[tuple[int, dict]]]:
    database = sqlite3.connect(folder / "trackio" / "osw-ft.db")
    rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    ((name, config),) = database.execute("SELECT run_name, config FROM configs").fetchall()
    return name, json.loads(config), [(step, json.loads(values)) for step, values in rows]


@pytest.mark.parametrize(("name", "read"), [("wandb", read_wandb), ("trackio", read_trackio)])
def test_a_killed_and_resumed_run_is_one_run_with_every_step_once(name, read, tmp_path):
    pytest.importorskip(name)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    for done, last, status in ((1, 4, -9), (2, 6, 0)):  # resumed from a checkpoint after step 2
        command = [sys.executable, "-c", START, name, str(done), str(last)]
        assert subprocess.run(command, cwd=tmp_path, env=env).returncode == status
    run_id, config, rows = read(tmp_path)
    assert run_id == "0a1b2c3d" and config["seed"] == 7
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6]
    for step, values in rows:
        assert values["loss"] == pytest.approx(1 / step) and values["clipped"] == 1 - step % 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_logger_that_fails_ends_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "broken", SimpleNamespace(init=lambda **_: 1 / 0))
    logger = Logger("broken", tmp_path, "0a1b2c3d", {}, [{"step": 1}])
    logger.log({"step": 2})
    logger.close()
    assert capsys.readouterr().err.count("the logger failed, the run continues: ") == 1


def test_a_training_run_is_logged_with_its_settings_and_continues(tiny, tmp_path):
    pytest.importorskip("trackio")
    run = tmp_path / "run"
    launch(*call_of("train_sft.py", tiny, run), "--logger", "trackio", "--max_steps", "4")
    shutil.rmtree(run / "checkpoint-000004")
    launch("train_sft.py", "--resume", run, "--max_steps", "6")
    name, config, rows = read_trackio(run)
    record = read_args(run)
    assert name == record["run_id"] and config.items() >= record["args"].items()
    for (step, values), row in zip(rows, metrics(run), strict=True):
        assert {**values, "step": step}.items() >= row.items()
