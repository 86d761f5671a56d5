"""Joining a Ray cluster, or starting one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from slime_core.errors import TrainerError
from slime_core.runtime.processes.tree import children_of

#: Environment variable that names the cluster to join.
ADDRESS = "RAY_ADDRESS"
#: Seconds in which a cluster's head answers.
_KNOCK_S = 10.0
#: Signals that a terminal, timeout(1) or a supervisor sends to a whole process group, which are this process's to heed; Ray leaves out
#: SIGINT by itself. Ray then ends its processes by SIGKILL, each a second after the SIGTERM that it does not hear.
_OF_A_GROUP = {signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM}
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
#: Seconds after which processes of a cluster that a run starts end when its head is gone: nobody starts it anew.
_HEADLESS_S = 10


def connect(num_cpus: int, address: str | None = None) -> bool:
    """Join a cluster, or start one of this machine alone; returns whether this call did.

    Args:
        num_cpus: cores that a cluster that is started has at least, however few the machine has.
        address: `HOST:PORT` of the cluster, `auto` for the one of this machine; None for what RAY_ADDRESS says, which starts
            one where it is not set.

    Raises:
        TrainerError: no cluster answers at that address, or none could be started.
    """
    if ray.is_initialized():
        return False
    with _own_sigterm():
        if joins(address):
            _join(address or os.environ[ADDRESS], "--ray-address" if address else ADDRESS)
        else:
            _start(num_cpus)
    return True


def joins(address: str | None) -> bool:
    """Return whether `connect` joins a cluster that is up."""
    return (address or os.environ.get(ADDRESS) or "local") != "local"


def _start(num_cpus: int) -> None:
    n_cpus = max(num_cpus, os.cpu_count() or 1)
    before = set(_daemons())
    # Ray gives itself 30 s, in which a busy machine has at least read its files: a second start is faster. It raises classes of
    # all kinds, Exception itself among them.
    try:
        _start_once(n_cpus)
    except Exception:
        _end_start(before)
        try:
            _start_once(n_cpus)
        except Exception as error:
            _end_start(before)
            raise TrainerError(
                f"launcher ray: Ray could not be started on this machine, twice: {error}; wanted a machine that is less busy, or "
                f"--ray-address of a cluster that is up; Ray's own logs are in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_*"
            ) from error


def _start_once(n_cpus: int) -> None:
    with _group_unheard():
        system = {"gcs_rpc_server_reconnect_timeout_s": _HEADLESS_S}
        ray.init(address="local", num_cpus=n_cpus, include_dashboard=False, _system_config=system, **_QUIET)


def _end_start(before: set[int]) -> None:
    """End what a start that failed has left: Ray itself ends only those that were up."""
    ray.shutdown()
    for pid in set(_daemons()) - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _daemons() -> list[int]:
    """Return the processes of Ray that this one has started."""
    package = os.path.dirname(ray.__file__).encode()
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += [pid] if package in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def _join(address: str, where: str) -> None:
    try:
        if address != "auto":  # Ray itself knocks for a minute, and says so line by line
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        try:
            ray.init(address=address, **_QUIET)
        except ConnectionError:  # a head that is busy answers later than the few seconds that Ray waits
            ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise TrainerError(
            f"{where}: found {address!r}, where no Ray cluster can be joined: {error}; wanted HOST:PORT as "
            f"`ray start --head` prints it, or neither --ray-address nor {ADDRESS}"
        ) from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Leave what this process does on SIGTERM as it is; Ray would have it print stacks and abort."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _group_unheard() -> Iterator[None]:
    """Have processes that are started in the block never hear signals to the whole group: this one ends them in its time."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
