"""Several hosts, each with its own launcher, on loopback; and torchrun in deepspeed's place."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import (
    ROOT,
    SETTING,
    assert_equal_up_to_rounding,
    call_of,
    free_port,
    metrics,
    needs_vllm,
    train,
    wait_for_rows,
)

BIN = Path(sys.executable).parent


def start_hosts(tmp_path: Path, *call) -> list[subprocess.Popen]:
    """Two hosts of one rank, started as on their own terminals."""
    (tmp_path / "hosts").write_text("hosta slots=1\nhostb slots=1\n")
    command = [BIN / "deepspeed", "--log_level", "error", "--hostfile", tmp_path / "hosts"]
    command += ["--no_ssh", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    return [
        subprocess.Popen([*map(str, [*command, "--node_rank", node, *call])], **streams)
        for node in range(2)
    ]


def rank_of(host: subprocess.Popen, script: str) -> psutil.Process:
    below = psutil.Process(host.pid).children(recursive=True)
    [rank] = [process for process in below if process.cmdline()[1:3] == ["-u", script]]
    return rank


@needs_vllm
def test_two_hosts_train_one_is_killed_and_both_resume(tiny, tmp_path):
    script = "train_oswft.py"
    call = call_of(script, tiny, tmp_path / "run")
    hosts = start_hosts(tmp_path, *call)
    wait_for_rows(tmp_path / "run", 3, hosts[0])
    rank_of(hosts[1], script).kill()
    killed = time.monotonic()
    outputs = [host.communicate(timeout=60)[0] for host in hosts]
    assert time.monotonic() - killed < 30 and all(host.returncode for host in hosts)
    said = [line for output in outputs for line in output.splitlines() if line[:5] == "error"]
    assert len(said) == 1 and said[0].startswith("error: rank 1 was killed"), outputs
    assert "Traceback" not in "".join(outputs)

    hosts = start_hosts(tmp_path, script, "--resume", tmp_path / "run")
    outputs = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs[0][-4000:]
    train("--output_dir", tmp_path / "whole", *SETTING[script], tiny=tiny, ranks=2, script=script)
    assert_equal_up_to_rounding(tmp_path / "run", tmp_path / "whole")


def test_torchrun_starts_what_deepspeed_starts(tiny, tmp_path):
    script = "train_sft.py"
    launcher = [BIN / "torchrun", "--nproc_per_node", "2", "--master_port", free_port()]
    call = [*launcher, *call_of(script, tiny, tmp_path / "run")]
    result = subprocess.run([*map(str, call)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    train("--output_dir", tmp_path / "other", *SETTING[script], tiny=tiny, ranks=2, script=script)
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(tmp_path / "other"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
