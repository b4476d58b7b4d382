"""The processes of a run: when one dies or fails, its launcher ends the others, and one speaks."""

import os
import re
import subprocess
import sys
import time

from conftest import ROOT, slow, start

import pytest

pytestmark = slow

RANK = """
import os, signal, sys, time
import arguments
from data import InputError

def interrupt(*_):  # as Run does: the launcher's SIGTERM is taken for Ctrl-C
    global asked
    asked = True

def main(args):
    from ranks import dist, init_ranks
    init_ranks("gloo")
    signal.signal(signal.SIGTERM, interrupt)
    dist.barrier()  # all ranks are here
    print("here", flush=True)
    match (args.plan, dist.get_rank()):
        case ("all fail", _):
            raise InputError("no such file")
        case ("one breaks", 1):
            raise AssertionError("a bug")
        case ("one is killed", 1):
            os.kill(os.getpid(), signal.SIGKILL)
    while not asked:  # at work, not in a collective
        time.sleep(0.1)
    dist.barrier()  # `should_stop`
    return 130

asked = False
arguments.saved_args = lambda kind: {}  # no command line
arguments.parse_args = lambda kind, *_: kind()
arguments.run_script(main, type("Args", (), {"plan": sys.argv[-1]}), "")
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Runs a plan on three ranks; returns the exit code, the errors, and the seconds it took."""
    path = tmp_path / "rank.py"
    path.write_text(RANK)

    def run_ranks(launcher: str, plan: str) -> tuple[int, str, float]:
        process = start(str(path), plan, ranks=3, launcher=launcher, stderr=subprocess.PIPE)
        while "here" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        here = time.monotonic()
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors, time.monotonic() - here

    return run_ranks


@pytest.mark.parametrize(
    ("launcher", "plan", "why"),
    [("deepspeed", "all fail", "no such file"), ("torchrun", "one breaks", "a bug")],
)
def test_an_error_of_one_rank_or_of_all_is_said_once_and_ends_all(run_ranks, launcher, plan, why):
    code, errors, seconds = run_ranks(launcher, plan)
    assert code != 0 and seconds < 30
    assert len(re.findall("^error: ", errors, re.MULTILINE)) == 1 and why in errors, errors


def test_a_killed_rank_ends_the_others_of_its_host(run_ranks):
    code, errors, seconds = run_ranks("deepspeed", "one is killed")
    assert code != 0 and seconds < 30, errors
    assert errors.count("error: T") == 1  # a survivor says that its peer is gone


def test_without_a_launcher_a_process_is_the_only_rank():
    """Whatever is left of one in its environment."""
    code = "import ranks; ranks.init_ranks('gloo'); print(ranks.gather([1]))"
    code += "; ranks.finish(0)"  # as every script ends
    env = {**os.environ, "RANK": "3", "OMP_NUM_THREADS": ""}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env) == b"[1]\n"
