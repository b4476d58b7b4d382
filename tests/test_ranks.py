"""The processes of a run: when one dies all end, in one line; a dead compiler's lock is removed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import ranks
from conftest import ROOT, free_port
from data import InputError

RANK = """
import sys, time
import torch.distributed as dist
import ranks

dist.init_process_group("gloo")
ranks.watch("go on with --resume")
print("ready", flush=True)
what = sys.argv[1]
if what == "fails":
    ranks.fail("no such file")
if what == "leaves":
    ranks.leave()
    sys.exit()
if what == "echo":  # stands in for a collective that breaks when its peer is gone
    time.sleep(1)
    ranks.fail("connection closed by peer")
time.sleep(100)
"""


def start_ranks(*plans: str) -> list[subprocess.Popen]:
    port = free_port()
    processes = []
    for rank, plan in enumerate(plans):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(plans))}
        env["LOCAL_RANK"] = str(rank)
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", RANK, plan], env=env, **streams))
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    return processes


def errors(processes: list[subprocess.Popen]) -> list[str]:
    """What all of them say, a line each, once all have ended."""
    said = [process.communicate(timeout=60)[1] for process in processes]
    return [line for text in said for line in text.splitlines() if line]


def test_without_a_launcher_a_process_is_the_only_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "before")  # and put back afterwards
    ranks.be_alone()
    assert int(os.environ["RANK"]) == 0 and int(os.environ["WORLD_SIZE"]) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="2 GPUs: start this script with: deepspeed"):
        ranks.be_alone()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_all_others_with_one_line(victim):
    processes = start_ranks("waits", "waits", "waits")
    processes[victim].send_signal(signal.SIGKILL)
    [line] = errors(processes)
    assert f"error: rank {victim} on " in line and line.endswith("go on with --resume")
    codes = [process.returncode for process in processes]
    assert codes.pop(victim) == -signal.SIGKILL and codes == [1, 1]


def test_what_a_dying_rank_breaks_elsewhere_is_not_reported_too():
    processes = start_ranks("waits", "echo", "waits")
    processes[2].send_signal(signal.SIGKILL)
    assert "error: rank 2 on " in errors(processes)[0]


def test_an_error_is_said_once_and_ends_all_ranks():
    assert errors(start_ranks("fails", "fails", "fails")) == ["error: no such file"]
    assert errors(start_ranks("waits", "waits", "fails")) == ["error on rank 2: no such file"]


def test_a_rank_that_is_done_ends_nobody():
    processes = start_ranks("leaves", "waits", "leaves")
    assert processes[0].wait(30) == processes[2].wait(30) == 0
    time.sleep(1)
    assert processes[1].poll() is None
    processes[1].kill()
    assert errors(processes) == []


def test_the_lock_of_a_killed_compiler_is_removed_and_a_living_one_s_is_not(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    ranks.clear_stale_lock()
    assert capsys.readouterr().err == ""

    compiler = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); time.sleep(3)"
    process = subprocess.Popen([sys.executable, "-c", compiler, lock])
    while not lock.exists():
        time.sleep(0.01)
    os.utime(lock, (0, 0))  # old, but its process lives
    ranks.clear_stale_lock()
    assert process.wait() == 0  # it was waited for
    assert not lock.exists()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "waiting for whoever compiles" in said[0]
    assert said[1] == f"{lock}: removed"
