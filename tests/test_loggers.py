"""--logger, with the real packages, offline: every step once, also after a kill."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, call_of, launch, metrics
from run import read_args

START = """
import os, signal, sys, time
from pathlib import Path
from run import Logger

name, folder, done, last, end = sys.argv[1:]

def row(step):
    return {"step": step, "loss": 1 / step, "clipped": step % 2 == 0, "train_tokens": 10 * step}

rows = [row(step) for step in range(1, int(done) + 1)]
logger = Logger(name, Path(folder), "0a1b2c3d", {"seed": 7}, rows)
for step in range(int(done) + 1, int(last) + 1):
    logger.log(row(step))
time.sleep(1)  # as long as trackio may keep a row back
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
logger.close()
"""


def begin(name: str, folder: Path, done: int, last: int, end: str, **env) -> str:
    """A run's process in which `done` steps are done, up to step `last`; returns what it says."""
    pytest.importorskip(name)
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **env}
    command = [sys.executable, "-c", START, name, str(folder), str(done), str(last), end]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == (-9 if end == "killed" else 0), result.stderr
    return result.stdout + result.stderr


def read_wandb(folder: Path) -> tuple[str, dict, list[tuple[int, dict]]]:
    """(run id, config, steps) of the newest start."""
    newest = sorted(folder.glob("wandb/offline-run-*"))[-1]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", newest]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return run["run_id"], run["config"]["update"], [(row.pop("_step"), row) for row in rows]


def read_trackio(folder: Path) -> tuple[str, dict, list[tuple[int, dict]]]:
    database = sqlite3.connect(folder / "trackio" / "osw-ft.db")
    rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    ((name, config),) = database.execute("SELECT run_name, config FROM configs").fetchall()
    assert {row[0] for row in rows} == {name}
    return name, json.loads(config), [(step, json.loads(values)) for _, step, values in rows]


READ = {"wandb": read_wandb, "trackio": read_trackio}


@pytest.mark.parametrize("name", READ)
def test_a_killed_and_resumed_run_is_one_run_with_every_step_once(name, tmp_path):
    folder, offline = tmp_path / "run", {"WANDB_MODE": "offline"}
    begin(name, folder, 1, 4, "killed", **offline)  # step 1 was done before there was a logger
    begin(name, folder, 2, 6, "closed", **offline)  # from a checkpoint after step 2
    run_id, config, rows = READ[name](folder)
    assert run_id == "0a1b2c3d" and config["seed"] == 7
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6]
    for step, values in rows:
        expected = {"loss": 1 / step, "clipped": 1 - step % 2, "train_tokens": 10 * step}
        assert {key: values[key] for key in expected} == pytest.approx(expected)
        assert all(key in expected or key.startswith("_") for key in values)
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_logger_that_fails_ends_no_run(tmp_path):
    output = begin("wandb", tmp_path / "run", 0, 2, "closed", WANDB_MODE="absent")
    assert output.count("the logger failed, the run continues: ") == 1
    assert "Traceback" not in output


def test_a_training_run_is_logged_with_its_settings_and_continues(tiny, tmp_path):
    """run.py treats all loggers alike; trackio is the one that would store a step twice."""
    pytest.importorskip("trackio")
    run, script = tmp_path / "run", "train_sft.py"
    launch(*call_of(script, tiny, run), "--logger", "trackio", "--max_steps", "4")
    run_id = read_args(run)["run_id"]
    shutil.rmtree(run / "checkpoint-000004")
    launch(script, "--resume", run, "--max_steps", "6")
    record = read_args(run)
    name, config, rows = read_trackio(run)
    assert name == run_id == record["run_id"]
    assert {key: config[key] for key in record["args"]} == record["args"]
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6]
    for (step, values), row in zip(rows, metrics(run), strict=True):
        assert {**values, "step": step}.items() >= row.items()
