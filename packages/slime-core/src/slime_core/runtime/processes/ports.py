"""TCP ports and addresses of this host."""

from __future__ import annotations

import socket
from typing import Any


class ReservedPort:
    """A free TCP port of this host, which no other process is given while it is reserved; a server can still listen there.

    Without it, of 64 ports that were free a moment ago two are the same in one try of eight.

    Args:
        host: address of this host; 0.0.0.0 for all of them.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Release it; may be called twice."""
        self._socket.close()


def free_port() -> int:
    """Return a TCP port of this host that was free a moment ago."""
    port = ReservedPort()
    port.release()
    return port.number


def port_is_free(port: int, *, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on a TCP port at an address of this host; an empty one stands for all of them."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def is_local_address(address: str) -> bool:
    """Return whether `host:port` is of this host, so that its server shares this host's memory."""
    host, _, _ = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return any(_can_bind(family, place) for family, *_, place in found)


def _can_bind(family: int, place: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True
