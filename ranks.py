"""Who takes part in a run: its processes, how they speak with each other, and how one ends.

A rank is one process, on one GPU if there are any; a host is a machine with some of the ranks. A
collective is a call that all ranks make in the same order: without one of them the others wait.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NoReturn

import cpu
from data import InputError

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


def init_ranks(backend: str, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the process group of the launcher; without one, be the only rank. A collective."""
    # torchrun has another name for it.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    alone = "WORLD_SIZE" not in os.environ
    if alone:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    cpu.share_cores()
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed and vLLM cause them.
    if torch.cuda.is_available():  # Otherwise each rank opens GPU 0, too.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    store = dist.HashStore() if alone else next(dist.rendezvous("env://", timeout=timeout))[0]
    if several_hosts():
        refuse_loopback(store)
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group(backend, store=store, timeout=timeout, **ranks)


def several_hosts() -> bool:
    """Whether some ranks are on another host."""
    return os.environ.get("LOCAL_SIZE") != os.environ.get("WORLD_SIZE")


def refuse_loopback(store: dist.Store) -> None:
    """Raise InputError if a host would tell gloo an address at which no other host reaches it."""
    address = ""
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
    store.set(f"host {os.environ['RANK']}", socket.gethostname())
    store.set(f"address {os.environ['RANK']}", address)
    for rank in range(int(os.environ["WORLD_SIZE"])):
        host, address = (store.get(f"{what} {rank}").decode() for what in ("host", "address"))
        if address.startswith("127."):
            advice = "set GLOO_SOCKET_IFNAME to the network's interface, such as eth0"
            raise InputError(f"{host} resolves to {address}, which others cannot reach: {advice}")


def share_stop_signals(signals: Sequence[int]) -> None:
    """When this rank gets one of these signals, tell all ranks through the store.

    A thread does it: Python's handlers do not run while the main thread waits in a collective.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)  # Python writes each signal's number to it.

    def tell() -> None:
        while os.read(read, 1)[0] not in signals:
            pass
        with contextlib.suppress(RuntimeError):  # Rank 0, which has the store, has ended.
            _get_default_store().set("stop", "")

    threading.Thread(target=tell, daemon=True).start()


def stop_was_shared() -> bool:
    """Whether a rank has put such a signal into the store. No collective."""
    return _get_default_store().check(["stop"])


def outlive_readers() -> None:
    """Let the readers of stdout and stderr go away: what is written later is lost."""

    def guarded(write: Callable, *args) -> None:
        with contextlib.suppress(OSError):  # A broken pipe, or a terminal that is gone.
            write(*args)

    for stream in (sys.stdout, sys.stderr):
        stream.write, stream.flush = partial(guarded, stream.write), partial(guarded, stream.flush)


def finish(status: int) -> NoReturn:
    """End this rank, at once: Python's own end would take four seconds."""
    sys.stdout.flush()
    os._exit(status)


def fail(reason: str, status: int = 1) -> NoReturn:
    """End this rank; if it is the first that fails, say why. The launcher ends the others."""
    with contextlib.suppress(OSError, RuntimeError):  # Rank 0 has ended: it or the launcher spoke.
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of each host
        if dist.is_initialized() and dist.get_world_size() > 1:
            server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(server, timeout=10).close()
            speaks = _get_default_store().add("failed", 1) == 1
        if speaks:
            print(f"error: {reason}", file=sys.stderr)
    finish(status)


def on_rank_0(function: Callable):
    """Call `function` on rank 0 alone, and return its result on every rank. A collective."""
    outcome = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome)
    return outcome[0]


def gather(items: list) -> list:
    """Every rank's list, one after the other, on every rank. A collective."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]
