"""The processes of a run: who takes part, what one tells the others, and how all of them end."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from unittest.mock import ANY, Mock, call

import cpu
import launch
import ranks
import train_sft
from conftest import call_of, slow, start
from data import InputError
from launch import claim_or_resume

import pytest
import torch
import torch.distributed as dist

JOINED = {  # what is in the environment -> rank, ranks, GPU and ranks of this host
    "": ({"RANK": "3", "LOCAL_RANK": "3"}, (0, 1, 0, "1")),  # of a launcher that is gone
    "deepspeed": ({"RANK": "3", "LOCAL_SIZE": "2", "WORLD_SIZE": "4"}, (3, 4, 1, "2")),
    "torchrun": ({"RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, (1, 2, 1, "2")),
}


@pytest.mark.parametrize("launcher", JOINED)
def test_a_process_joins_as_its_launcher_says_and_is_alone_without_one(launcher, monkeypatch):
    environment, (rank, size, gpu, local_size) = JOINED[launcher]
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1", **environment})
    made, timeout = Mock(), timedelta(minutes=7)
    made.dist.rendezvous.return_value = iter([("the launcher's", rank, size)])
    made.dist.HashStore.return_value = "its own"
    for module, name in ((ranks, "dist"), (ranks, "refuse_loopback"), (cpu, "share_cores")):
        monkeypatch.setattr(module, name, getattr(made, name))
    monkeypatch.setattr(torch, "cuda", made.cuda)
    ranks.init_ranks("nccl", timeout)
    store = "the launcher's" if launcher else "its own"
    met = call.dist.rendezvous("env://", timeout=timeout) if launcher else call.dist.HashStore()
    elsewhere = [call.refuse_loopback(store)] * (launcher == "deepspeed")
    ours = {"store": store, "timeout": timeout, "rank": rank, "world_size": size}
    joined = call.dist.init_process_group("nccl", **ours)
    begun = [call.share_cores(), call.cuda.is_available(), call.cuda.set_device(gpu)]
    assert made.mock_calls == [*begun, met, *elsewhere, joined]
    assert os.environ["LOCAL_SIZE"] == local_size


def test_a_host_whose_name_leads_to_itself_alone_is_named_on_every_host(monkeypatch):
    """As Debian writes /etc/hosts; gloo would tell the others that address."""
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    for ours, theirs, interface, named in (
        ("127.0.1.1", "10.0.0.7", {}, "here"),
        ("10.0.0.7", "127.0.1.1", {}, "there"),
        ("127.0.1.1", "10.0.0.7", {"GLOO_SOCKET_IFNAME": "eth0"}, None),
        (OSError, "10.0.0.7", {}, None),  # a name that leads nowhere
    ):
        monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2", **interface})
        monkeypatch.setattr(socket, "gethostbyname", Mock(side_effect=[ours]))
        store = dist.HashStore()
        store.set("host 0", "there")
        store.set("address 0", theirs)
        refused = pytest.raises(InputError, match=f"^{named} resolves to 127.0.1.1, .* GLOO_SOCKET")
        with refused if named else contextlib.nullcontext():
            ranks.refuse_loopback(store)
        own = "" if interface or ours is OSError else ours
        assert store.get("host 1") == b"here" and store.get("address 1").decode() == own


def test_a_rank_that_is_asked_to_stop_tells_all_and_no_other_signal_does(monkeypatch):
    store, made, (read, write) = dist.HashStore(), Mock(), os.pipe()
    monkeypatch.setattr(ranks, "_get_default_store", lambda: store)
    monkeypatch.setattr(os, "pipe", lambda: (read, write))
    monkeypatch.setattr(ranks, "signal", made.signal)
    monkeypatch.setattr(ranks, "threading", made.threading)
    ranks.share_stop_signals([signal.SIGUSR1])
    thread = call.threading.Thread(target=ANY, daemon=True)
    assert made.mock_calls == [call.signal.set_wakeup_fd(write), thread, thread.start()]
    assert not os.get_blocking(write)  # Python asks for it
    tell = made.threading.Thread.call_args.kwargs["target"]
    os.set_blocking(read, False)
    os.write(write, bytes([signal.SIGUSR2]))
    with pytest.raises(BlockingIOError):  # it reads on
        tell()
    assert not ranks.stop_was_shared()
    os.write(write, bytes([signal.SIGUSR1]))
    tell()
    assert ranks.stop_was_shared()


def test_the_first_rank_that_fails_says_why_and_each_ends_with_its_status(monkeypatch):
    store, server = dist.HashStore(), socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(ranks, "_get_default_store", lambda: store)
    monkeypatch.setattr(os, "_exit", sys.exit)

    def fail(size: int, **environment) -> bool:
        """Whether a rank speaks; a group of 0 has not met yet."""
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        monkeypatch.setattr(os, "environ", address | environment)
        monkeypatch.setattr(dist, "is_initialized", lambda: size > 0)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        out, err = (io.TextIOWrapper(io.BytesIO(), line_buffering=errs) for errs in (False, True))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            print("a last line")
            with pytest.raises(SystemExit, match="3"):
                ranks.fail("no disk", status=3)
        assert out.buffer.getvalue() == b"a last line\n"
        assert err.buffer.getvalue() in (b"error: no disk\n", b"")
        return bool(err.buffer.getvalue())

    port = server.getsockname()[1]
    assert [fail(0), fail(0, LOCAL_RANK="0"), fail(0, LOCAL_RANK="1")] == [True, True, False]
    assert [fail(1), fail(2, LOCAL_RANK="1"), fail(2), fail(2)] == [True, True, False, False]
    server.close()
    store.delete_key("failed")
    assert not fail(2)  # rank 0 has ended: it or the launcher has spoken


def test_what_is_gathered_is_all_ranks_in_their_order(monkeypatch):
    gather = lambda lists, own: lists.__setitem__(slice(2), [[1, 2], own])  # noqa: E731
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert ranks.gather([3]) == [1, 2, 3]


def test_hosts_with_a_folder_or_code_of_their_own_are_refused(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(launch, "provenance", lambda: "code 1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    folder = tmp_path / "run"

    def claim(*others: list) -> object:
        """Where the other hosts say this of the folder, then of the code."""
        said = iter(others)
        monkeypatch.setattr(launch, "gather", Mock(side_effect=lambda own: own + next(said)))
        found = claim_or_resume(train_sft.Args(model="m", data="d", output_dir=str(folder)))
        assert next(said, None) is None
        return found

    see, same = [("b", True), ("c", True)], [("b", "code 1"), ("c", "code 1")]
    assert claim(see, same) is None
    assert launch.gather.mock_calls == [call([("here", True)]), call([("here", "code 1")])]
    with pytest.raises(InputError, match=f"c does not see {folder}: hosts must share it"):
        claim([("b", True), ("c", False)])
    with pytest.raises(InputError, match="c has other code: code 2; here: code 1"):
        claim(see, [("b", "code 1"), ("c", "code 2")])
    # On another host, which hears what rank 0 has found.
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box: box.__setitem__(0, "its"))
    assert claim(see, same) == "its"


RANK = """
import os, signal
from launch import command_line
from ranks import dist, init_ranks

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
init_ranks("gloo")
with command_line():
    dist.barrier()  # all ranks are here
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.sigwait([signal.SIGTERM])  # the launcher's, which Run takes for Ctrl-C
    dist.barrier()
"""


@slow
def test_ranks_that_lose_one_say_so_once_and_end(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    options = {"launcher": "deepspeed", "stderr": subprocess.PIPE}
    process = start(str(tmp_path / "rank.py"), ranks=3, **options)
    _, errors = process.communicate(timeout=600)  # it would wait for ever
    assert process.returncode != 0
    assert len(re.findall("^error: ", errors, re.MULTILINE)) == 1, errors


@slow
def test_a_run_outlives_who_reads_its_output(tiny, tmp_path):
    call = (*call_of("train_sft.py", tiny, tmp_path / "run"), "--max_steps", 2)
    process = start(*call, stderr=subprocess.PIPE)
    assert process.stderr.read(1)  # Its first line: nothing is trained yet.
    process.stderr.close()
    process.stdout.close()
    assert process.wait(timeout=600) == 0 and (tmp_path / "run" / "final").exists()
