"""The processes of a run: how they share a host, which one speaks, and how all end when one dies.

Each rank keeps a connection to rank 0, which the system closes when one of the two dies. A
collective would notice that late, or never: a rank may sample for minutes before it meets others.
"""

import contextlib
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import get_default_build_root

from data import InputError

LEFT, SAID = b".", b"!"  # a rank's last word: it is done, or it has said what is wrong
JOIN_TIMEOUT = 300  # seconds until all ranks have a connection to rank 0
ECHO = 3.0  # seconds in which an error that is only the echo of another rank's end is cleared up
LOCK_AGE = 120  # seconds; DeepSpeed's op is compiled in one minute

_left = threading.Event()
_peers: dict[socket.socket, str] = {}  # whom this process watches: rank 0 all, the others rank 0


def free_port() -> str:
    """A port for MASTER_PORT that nothing on this host listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def be_alone() -> None:
    """Without a launcher: be the only rank. Raises InputError if there are GPUs for more."""
    if torch.cuda.device_count() > 1:
        raise InputError(
            f"{torch.cuda.device_count()} GPUs: start this script with: deepspeed "
            f"{os.path.basename(sys.argv[0])} ..., or show it one with CUDA_VISIBLE_DEVICES=0"
        )
    # a port of its own: DeepSpeed names shared memory after it
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def share_cores() -> None:
    """Give each rank of this host its share of the cores, unless OMP_NUM_THREADS is set.

    vLLM leaves torch a single thread where the variable is not set.
    """
    # DeepSpeed's C++ code reads LOCAL_SIZE, as its launcher sets it; torchrun has another name
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_SIZE"]))
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]  # nobody's wish: torchrun sets it
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def clear_stale_lock() -> None:
    """Wait until nobody compiles DeepSpeed's CPU op, and remove the lock that a kill has left.

    torch waits for that lock without a word, for ever. It is stale when no process of this host
    has it open, and when it is so old that another host with the same home has no use for it.
    """
    first = int(os.environ["LOCAL_RANK"]) == 0  # only it speaks and removes
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob("**/deepspeed_*/lock"):
        if first:
            said = "waiting for whoever compiles DeepSpeed's CPU op; if nobody does, the lock is"
            print(f"{lock}: {said} removed when it is {LOCK_AGE} s old", file=sys.stderr)
        with contextlib.suppress(FileNotFoundError):
            while True:
                age = time.time() - lock.stat().st_mtime  # fails when the lock is gone
                if first and age > LOCK_AGE and not _is_open(lock):
                    lock.unlink()
                    print(f"{lock}: removed", file=sys.stderr)
                time.sleep(0.5)


def _is_open(path: Path) -> bool:
    """Whether a process of this host, as far as we may look, has the file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink() == path.resolve():
                return True
        except OSError:
            pass  # it was closed just now, or is none of ours
    return False


def on_rank_0(function: Callable):
    """What `function` returns on rank 0, for every rank; if it raises, all end. A collective."""
    if not dist.is_initialized():  # an evaluation in one process
        return function()
    outcome = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome)
    return outcome[0]


# ------------------------------------------------------------------------------------------------
# The end


def watch(advice: str) -> None:
    """From now on, end this process when another rank ends before its time. A collective.

    Args:
        advice: what to do then, for the one line that is printed.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    server = socket.create_server(("", 0), backlog=world_size) if rank == 0 else None
    address = [server.getsockname()[1], secrets.token_bytes(16)] if server else [None, None]
    dist.broadcast_object_list(address)
    port, token = address
    try:
        if server:
            _accept(server, token, world_size - 1)
        else:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], port), JOIN_TIMEOUT)
            peer.sendall(token + f"rank {rank} on {socket.gethostname()}".encode())
            _peers[peer] = f"rank 0 on {os.environ['MASTER_ADDR']}"
    except OSError as error:
        where = f"{os.environ['MASTER_ADDR']}:{port}"
        raise InputError(f"rank {rank}: no connection to {where}: {error}; a firewall?") from error
    for peer in _peers:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host may vanish
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # If rank 0 is gone, all others see it: rank 1 says so, and the first of each host.
    speaks = rank <= 1 or os.environ["LOCAL_RANK"] == "0"
    threading.Thread(target=_watch, args=(speaks, advice), daemon=True).start()


def _accept(server: socket.socket, token: bytes, count: int) -> None:
    """Wait until so many ranks have named themselves."""
    server.settimeout(JOIN_TIMEOUT)
    with server:
        while len(_peers) < count:
            peer, _ = server.accept()
            peer.settimeout(10)
            with contextlib.suppress(OSError):  # a stranger who says nothing
                hello = peer.recv(1024)
                if hello.startswith(token):
                    _peers[peer] = hello.removeprefix(token).decode()


def _watch(speaks: bool, advice: str) -> None:
    while _peers:
        for peer in select.select(list(_peers), [], [])[0]:
            try:
                word = peer.recv(1)
            except OSError:
                word = b""
            name = _peers.pop(peer)
            if word == LEFT or _left.is_set():
                continue
            if word != SAID and speaks:
                why = "if it did not say why, it was killed (out of memory?) or is out of reach"
                print(f"\nerror: {name} is gone; {why}; {advice}", file=sys.stderr, flush=True)
            _tell(SAID)
            os._exit(1)


def _tell(word: bytes) -> None:
    for peer in list(_peers):
        with contextlib.suppress(OSError):  # it has ended, too
            peer.sendall(word)


def leave() -> None:
    """This rank is done: its end means nothing to the others."""
    _left.set()
    _tell(LEFT)


def fail(reason: str, status: int = 1) -> NoReturn:
    """End all ranks with one line. Where several have the same error, only the first one says it.

    The process ends without cleaning up: other ranks may be waiting for it.
    """
    rank = int(os.environ.get("RANK", 0))
    stopped = status == 130  # all ranks were, and a launcher may give them no time
    if stopped:
        _left.set()
    elif _peers:
        # Rank 0's line, or that of a rank that died, comes first and ends this process.
        time.sleep(ECHO if rank else ECHO / 3)
    if not stopped or rank == 0:
        what = ("stopped" if stopped else "error") + (f" on rank {rank}" if rank else "")
        print(f"{what}: {reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    _tell(SAID)
    os._exit(status)
