"""Several hosts: network namespaces on one disk, each with a name and an address of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest
from conftest import BIN, ROOT, call_of, ended, launch, needs_vllm, slow

import pytest

IP = shutil.which("ip")
NO_HOSTS = os.geteuid() != 0 or IP is None
pytestmark = [slow, pytest.mark.skipif(NO_HOSTS, reason="makes hosts with `ip netns`, as root")]
ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}


def ip(*words) -> str:
    return subprocess.run([IP, *map(str, words)], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def make_hosts() -> Iterator[Callable[[int], list[str]]]:
    """Makes that many hosts, whose eth0 a switch joins; returns their names."""
    switch, made = f"osw{os.getpid()}", []

    def make(count: int) -> list[str]:
        names = [f"{switch}-{n}" for n in range(count)]
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
                made.append(name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"`ip netns` may not be used here: {error.stderr}")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        table = "".join(f"10.77.0.{n} {name}\n" for n, name in enumerate(names, 1))
        for n, name in enumerate(names, 1):
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "add", f"v{n}", "netns", switch, *peer)
            ip("-n", switch, "link", "set", f"v{n}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{n}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
            folder = Path("/etc/netns", name)  # what is in it lies over /etc there
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        return names

    yield make
    for name in made:
        kill_all(name)
        ip("netns", "del", name)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def kill_all(host: str) -> None:
    """Its processes, with -9."""
    for pid in ip("netns", "pids", host).split():
        subprocess.run(["kill", "-9", pid], check=False)


def on(host: str, *command) -> list[str]:
    """A command, for a host."""
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
    return [IP, "netns", "exec", host, *named, host, *map(str, command)]


def begin(host: str, *command, folder: Path, env: dict) -> subprocess.Popen:
    """Start a command on a host; its two streams are one."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = os.environ | {name: str(value) for name, value in env.items()}
    return subprocess.Popen(on(host, *command), cwd=folder, env=env, **options)


def ends(processes: list) -> list[tuple[int, str]]:
    """Exit status and output of each."""
    outputs = [ended(process) for process in processes]
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]


@needs_vllm
def test_three_hosts_with_a_launcher_each_train_as_one_does(make_hosts, tiny, tmp_path):
    steps, names = ("--max_steps", 2), make_hosts(3)
    launch(*call_of("train_grpo.py", tiny, tmp_path / "whole"), *steps)
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    command = [BIN / "deepspeed", "--log_level", "error", "--hostfile", tmp_path / "hosts"]
    command += ["--no_ssh", "--master_addr", names[0], "--node_rank"]
    call = (*call_of("train_grpo.py", tiny, tmp_path / "run"), *steps)
    hosts = [begin(n, *command, rank, *call, folder=ROOT, env=ETH0) for rank, n in enumerate(names)]
    for status, output in ends(hosts):
        assert status == 0, output
    conftest.assert_equal_up_to_rounding(tmp_path / "run", tmp_path / "whole")


def test_a_killed_host_ends_the_run_with_one_error_and_it_is_resumed(make_hosts, tiny, tmp_path):
    names = make_hosts(2)
    script, *call = call_of("train_sft.py", tiny, tmp_path / "run")
    command = (sys.executable, ROOT / script, *call, "--max_steps", 500)
    env = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "PYTHONPATH": ROOT, **ETH0}
    env |= {"MASTER_ADDR": names[0], "MASTER_PORT": 29500}
    hosts = [
        begin(n, *command, folder=tmp_path, env=env | {"RANK": r}) for r, n in enumerate(names)
    ]
    conftest.wait_for_rows(tmp_path / "run", 3, hosts[0])
    kill_all(names[1])
    (status, output), _ = ends(hosts)  # long before the thirty minutes of a collective
    assert status and output.count("error: ") == 1 and "peer" in output, output
    launch("train_sft.py", "--resume", tmp_path / "run", "--max_steps", 8)
    launch(*call_of("train_sft.py", tiny, tmp_path / "whole"))
    conftest.assert_equal_up_to_rounding(tmp_path / "run", tmp_path / "whole")
