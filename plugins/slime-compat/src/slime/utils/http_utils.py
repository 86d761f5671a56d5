"""Requests over HTTP."""

from slime_compat.views.http import get, post
from slime_core.runtime.processes.ports import free_port, port_is_free


def find_available_port(base_port: int = 0) -> int:
    """Return a free TCP port of this host."""
    return free_port()


def is_port_available(port: int) -> bool:
    """Return whether a server could listen on a port of this host."""
    return port_is_free(port)


def init_http_client(args: object) -> None:
    """Do nothing: each request has its connection."""


__all__ = ["find_available_port", "get", "init_http_client", "is_port_available", "post"]
