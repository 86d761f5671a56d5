"""This host: its name, addresses and free ports, and what a run has of engines."""

from __future__ import annotations

import os
import socket
from typing import Any

from slime_core.runtime.processes.ports import free_port, port_is_free

#: Variable that says which address of this host others reach.
HOST_IP = "SLIME_HOST_IP"


def get_host_info() -> tuple[str, str]:
    """Return (name, address) of this host; `SLIME_HOST_IP` says another address."""
    name = socket.gethostname()
    return name, os.environ.get(HOST_IP) or _address(name)


def get_current_node_ip() -> str:
    """Return the address of this host."""
    return get_host_info()[1]


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return a free TCP port of this host, the first of as many that follow each other."""
    port = start_port
    while not all(port_is_free(port + place) for place in range(consecutive)):
        port += 1
    return port


def find_available_port(base_port: int = 0) -> int:
    """Return a free TCP port of this host."""
    return free_port()


def is_port_available(port: int) -> bool:
    """Return whether a server could listen on a port of this host."""
    return port_is_free(port)


def get_rollout_num_engines(args: Any) -> int:
    """Return the number of engines that requests go to: one, which passes them on."""
    return int(args.rollout_num_engines)


def _address(name: str) -> str:
    """Return the first address of a name that is no loopback, or else that of the loopback."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        found = []
    return next((str(one[4][0]) for one in found if not str(one[4][0]).startswith("127.")), "127.0.0.1")
