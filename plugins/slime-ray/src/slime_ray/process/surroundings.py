"""`Surroundings`: what makes an actor's process one of the run's: folder, import path, environment, devices and log."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime_core.plugins.registry import ALLOW_LIST
from slime_core.runtime.processes.ports import interface_of
from slime_core.runtime.processes.stacks import write_stacks_when_asked

#: The network interface of gloo's groups.
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Surroundings:
    """What a process takes over from the driver's, so that names mean the same in both, and what is its own."""

    folder: Path
    """Working directory."""
    import_path: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that are set before anything is imported."""
    log: Path
    """File that its output goes to, from `begin_log` on; before, it goes to Ray's own logs."""
    sharing: int
    """Processes that share the cores of this machine, of which it is one."""


def allowed_plugins() -> dict[str, str]:
    """Return the variable that says which plugins may be used, where the driver has it."""
    return {ALLOW_LIST: os.environ[ALLOW_LIST]} if ALLOW_LIST in os.environ else {}


def move_in(surroundings: Surroundings, gpus: Sequence[str] | None = None) -> None:
    """Give this process the driver's surroundings, and threads of its own.

    Args:
        surroundings: of this process. Its log is not begun yet: the run may not have its folder.
        gpus: ids of the GPUs that it sees, none at all if it is empty; None for those that Ray lets it see.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // surroundings.sharing))
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    sys.path += [entry for entry in surroundings.import_path if entry not in sys.path]
    outlive_sigterm()


def outlive_sigterm() -> None:
    """Where the run has started Ray deaf to SIGTERM, have this process go on at one, and what this thread starts heed it.

    To be called on each thread that starts processes and that Ray has made, on the main thread first.
    """
    if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return  # a cluster that was there before, whose processes do as they always do
    heard = {signal.SIGTERM}
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, lambda number, frame: None
        )  # which a program that is executed does not inherit
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, heard),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, heard),
            after_in_child=_hear_sigterm,
        )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)


def _hear_sigterm() -> None:
    """In a process that was forked: end by SIGTERM, also by one that came while it was blocked."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def use_interface_of(address: str) -> None:
    """Have gloo groups of this process, and of those that it starts, use the network interface that has an address.

    By itself gloo takes the address that the machine's own name means, which is a loopback one on many: other machines do not reach it.
    What the user has set stays, and so does gloo's choice where the address is a loopback one itself, or no interface's.
    """
    if address.startswith("127.") or _INTERFACE in os.environ:
        return
    if (name := interface_of(address)) is not None:
        os.environ[_INTERFACE] = name


def begin_log(log: Path) -> None:
    """Have what this process prints, its warnings and its stacks go to a file, behind what is there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    output = log.open("a", buffering=1)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    write_stacks_when_asked(output)
    logging.basicConfig(stream=output, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("slime_ray").setLevel(logging.INFO)
