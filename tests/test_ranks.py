"""The processes of a run: when one dies or fails, all end, in one line."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

import pytest

import engine
from conftest import ROOT, free_port

FORKS = multiprocessing.get_context("forkserver")  # its children need not import torch again
FORKS.set_forkserver_preload(["engine"])


def be_rank(plan: str, path: str, **env: str) -> None:
    os.environ.update(env)
    os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), 2)
    engine.init_ranks("gloo")
    engine.dist.barrier()  # all ranks are here
    match plan:
        case "waits":
            time.sleep(100)
        case "fails":
            engine.fail("no such file")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "echoes":  # stands in for a collective that breaks when its peer is gone
            time.sleep(0.5)
            engine.fail("connection closed by peer")
        case "is late":
            time.sleep(2)
    engine.finish(0)


@pytest.fixture
def run_ranks(tmp_path, monkeypatch):
    """Runs a plan for each rank; returns exit codes, error lines, seconds from first to last."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the fork server

    def run_ranks(*plans: str) -> tuple[list[int], list[str], float]:
        said, ranks = tmp_path / "stderr", []
        said.touch()
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank, plan in enumerate(plans):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(plans))}
            ranks.append(FORKS.Process(target=be_rank, args=(plan, said), kwargs=env | place))
            ranks[-1].start()
        wait([rank.sentinel for rank in ranks])
        first = time.monotonic()
        for rank in ranks:
            rank.join(60)
        lines = [line for line in said.read_text().splitlines() if line.startswith("error")]
        return [rank.exitcode for rank in ranks], lines, time.monotonic() - first

    return run_ranks


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_all_others_within_two_seconds_with_one_line(run_ranks, victim):
    plans = ["waits"] * 3
    plans[victim] = "is killed"
    codes, [line], seconds = run_ranks(*plans)
    assert line.startswith(f"error: rank {victim} was killed") and "--resume" in line
    assert codes.pop(victim) == -signal.SIGKILL and codes == [1, 1] and seconds < 2


def test_what_a_dying_rank_breaks_elsewhere_is_not_reported_too(run_ranks):
    _, [line], _ = run_ranks("waits", "echoes", "is killed")
    assert line.startswith("error: rank 2 was killed")


@pytest.mark.parametrize("plans", [("fails", "fails", "fails"), ("waits", "waits", "fails")])
def test_an_error_of_one_rank_or_of_all_is_said_once_and_ends_all(run_ranks, plans):
    codes, [line], seconds = run_ranks(*plans)
    assert line.endswith("no such file") and codes == [1, 1, 1] and seconds < 2


def test_a_rank_that_is_done_ends_no_other(run_ranks):
    codes, lines, seconds = run_ranks("is done", "is late", "is done")
    assert codes == [0, 0, 0] and not lines and seconds > 1


def test_without_a_launcher_a_process_is_the_only_rank_and_two_gpus_need_one():
    env = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    code = (
        "import engine, torch; engine.init_ranks('gloo'); print(engine.gather([1]));"
        "torch.cuda.device_count = lambda: 2; del engine.os.environ['RANK'];"
        "engine.init_ranks('gloo')"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.stdout == "[1]\n" and "InputError: 2 GPUs: start with" in result.stderr
