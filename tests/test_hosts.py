"""Several hosts: network namespaces on one disk, each with a name and an address of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest
from conftest import BIN, ROOT, TINY_LENGTHS, call_of, ended, launch, needs_vllm, slow
from data import write_rows
from evaluate import read_samples

import pytest

IP = shutil.which("ip")
NO_HOSTS = os.geteuid() != 0 or IP is None
pytestmark = [slow, pytest.mark.skipif(NO_HOSTS, reason="makes hosts with `ip netns`, as root")]
needs_ssh = pytest.mark.skipif(
    not (Path("/usr/sbin/sshd").exists() and shutil.which("pdsh")),
    reason="needs openssh-server and pdsh",
)
ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}

# SFT that notices sooner that a host does not see the folder.
SOON = """
import arguments, train_sft
arguments.NFS_DELAY_S = 2
arguments.run_script(train_sft.main, train_sft.Args, "")
"""


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


def hostfile(hosts: list[str], folder: Path) -> Path:
    """As deepspeed wants it: one rank each."""
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in hosts))
    return folder / "hosts"


def begin(host: str, *command, folder: Path, env: dict) -> subprocess.Popen:
    """Start a command on a host; its two streams are one."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = os.environ | {name: str(value) for name, value in env.items()}
    return subprocess.Popen(on(host, *command), cwd=folder, env=env, **options)


def start_hosts(
    hosts: list[str], folder: Path, script, *call, network=ETH0, last_folder=None, last_code=ROOT
) -> list:
    """A script on all hosts, one rank each, told what a launcher would tell it.

    The last host may have another working directory or other code.
    """
    found = {"WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    found |= {"MASTER_ADDR": hosts[0], "MASTER_PORT": 29500, **network}
    processes = []
    for rank, host in enumerate(hosts):
        last = host == hosts[-1]
        env = {**found, "RANK": rank, "PYTHONPATH": last_code if last else ROOT}
        where = last_folder if last and last_folder else folder
        command = (sys.executable, ROOT / script, *call)
        processes.append(begin(host, *command, folder=where, env=env))
    return processes


def ends(processes: list, seconds: float = 200) -> list[tuple[int, str]]:
    """Exit status and output of each."""
    outputs = [ended(process, seconds) for process in processes]
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]


@needs_vllm
def test_three_hosts_with_a_launcher_each_train_as_one_does(make_hosts, tiny, tmp_path):
    steps, names = ("--max_steps", 2), make_hosts(3)
    launch(*call_of("train_grpo.py", tiny, tmp_path / "whole"), *steps)
    command = [BIN / "deepspeed", "--log_level", "error", "--hostfile", hostfile(names, tmp_path)]
    command += ["--no_ssh", "--master_addr", names[0], "--node_rank"]
    call = (*call_of("train_grpo.py", tiny, tmp_path / "run"), *steps)
    hosts = [begin(n, *command, rank, *call, folder=ROOT, env=ETH0) for rank, n in enumerate(names)]
    for status, output in ends(hosts):
        assert status == 0, output
    conftest.assert_equal_up_to_rounding(tmp_path / "run", tmp_path / "whole")


@needs_vllm
def test_hosts_evaluate_together(make_hosts, tiny, tmp_path):
    hosts, model = make_hosts(2), ("--model", tiny / "model", *TINY_LENGTHS[2:])
    easy = (tiny / "heldout" / "easy.jsonl").read_text().splitlines()[:12]
    write_rows(map(json.loads, easy), tmp_path / "easy.jsonl")
    call = ("evaluate.py", *model, "--benchmark_file", tmp_path / "easy.jsonl", "--num_samples", 2)
    scored = ends(start_hosts(hosts, tmp_path, *call, "--output_dir", tmp_path / "eval"))
    assert [status for status, _ in scored] == [0, 0] and "easy" in scored[0][1]
    [rows] = read_samples(tmp_path / "eval").values()
    assert len(rows) == 24 and len([*(tmp_path / "eval").glob("samples.rank*")]) == 2


def test_a_killed_host_ends_the_run_with_one_error_and_it_is_resumed(make_hosts, tiny, tmp_path):
    names = make_hosts(2)
    call = call_of("train_sft.py", tiny, tmp_path / "run")
    hosts = start_hosts(names, tmp_path, *call, "--max_steps", 500)
    conftest.wait_for_rows(tmp_path / "run", 3, hosts[0])
    began = time.monotonic()
    kill_all(names[1])
    (status, output), _ = ends(hosts, 60)
    assert status and time.monotonic() - began < 30, output
    assert output.count("error: ") == 1 and "peer" in output
    launch("train_sft.py", "--resume", tmp_path / "run", "--max_steps", 8)
    launch(*call_of("train_sft.py", tiny, tmp_path / "whole"))
    conftest.assert_equal_up_to_rounding(tmp_path / "run", tmp_path / "whole")


def test_a_host_that_the_others_cannot_reach_is_refused_at_once(make_hosts, tiny, tmp_path):
    names = make_hosts(2)
    path = Path("/etc/netns", names[1], "hosts")
    path.write_text(f"127.0.1.1 {names[1]}\n{path.read_text()}")  # as Debian writes it
    call = call_of("train_sft.py", tiny, tmp_path / "run")
    (status, output), (other, _) = ends(start_hosts(names, tmp_path, *call, network={}))
    assert status == other == 1
    assert f"error: {names[1]} resolves to 127.0.1.1" in output and "GLOO_SOCKET" in output


@pytest.mark.parametrize(
    ("own", "said"), [("last_folder", "does not see"), ("last_code", "has other code")]
)
def test_a_host_with_a_folder_or_code_of_its_own_is_refused(own, said, make_hosts, tiny, tmp_path):
    (tmp_path / "soon.py").write_text(SOON)
    (tmp_path / "other").mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path / "other")  # not in git
    names, last = make_hosts(2), {own: tmp_path / "other"}
    _, *call = call_of("train_sft.py", tiny, Path("run"))
    outputs = ends(start_hosts(names, tmp_path, tmp_path / "soon.py", *call, **last), 60)
    assert all(status == 1 for status, _ in outputs), outputs
    assert f"{names[1]} {said}" in str(outputs), outputs


@needs_ssh
@needs_vllm
def test_one_host_starts_all_over_ssh(make_hosts, tiny, tmp_path):
    names, sshd = make_hosts(2), "/usr/sbin/sshd"
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", tmp_path / key], check=True)
    shutil.copy(tmp_path / "user.pub", tmp_path / "allowed")
    options = {"HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "allowed"}
    options |= {"StrictModes": "no", "PermitRootLogin": "yes", "PidFile": "none"}
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    for name in names:
        subprocess.Popen(on(name, sshd, "-D", "-f", "/dev/null", *flags))
    key = f"-i {tmp_path}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    (tmp_path / "env").write_text(f"GLOO_SOCKET_IFNAME=eth0\nPYTHONPATH={ROOT}\n")
    command = [BIN / "deepspeed", "--quiet", "--hostfile", hostfile(names, tmp_path)]
    command += ["--no_ssh_check", "--master_addr", names[0]]
    steps = ("--max_steps", 2)
    script, *call = call_of("train_oswft.py", tiny, tmp_path / "run")
    env = {**os.environ, "PDSH_SSH_ARGS_APPEND": key, "DS_ENV_FILE": str(tmp_path / "env")}
    launched = on(names[0], *command, ROOT / script, *call, *steps)
    done = subprocess.run(launched, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    launch(*call_of(script, tiny, tmp_path / "whole"), *steps)
    conftest.assert_equal_up_to_rounding(tmp_path / "run", tmp_path / "whole")
