"""TCP ports and addresses of this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from typing import Any

#: Ports that a server of several processes may want in a row: SGLang's ranks meet at the first, and the further ones, of which
#: the last is 13 after it, are for attention that is divided among them (`--enable-dp-attention`, SGLang 0.5.23).
_IN_A_ROW = 14
#: Asks for the address of a network interface (Linux, netdevice(7)).
_SIOCGIFADDR = 0x8915
#: Times that ports in a row are sought.
_TRIES = 100


class ReservedPort(contextlib.AbstractContextManager["ReservedPort"]):
    """A TCP port that is free at every address of this host, and that no other process is given while it is reserved.

    A server can still listen there, at one address or at all of them, as the stores of torch.distributed do.
    Without it, of 64 ports that were free a moment ago two are the same in one try of eight.

    Args:
        in_a_row: how many ports are reserved, from `number` on.

    Raises:
        OSError: this host has not as many free ports in a row.
    """

    def __init__(self, *, in_a_row: int = 1) -> None:
        for _ in range(_TRIES):
            with contextlib.ExitStack() as held:
                self.number = int(held.enter_context(_bound(0)).getsockname()[1])
                with contextlib.suppress(OSError, OverflowError):  # one is taken, or past the last one
                    for further in range(1, in_a_row):
                        held.enter_context(_bound(self.number + further))
                    self._held = held.pop_all()
                    return
        raise OSError(f"found no {in_a_row} free TCP ports in a row")

    def __exit__(self, *error: object) -> None:
        """Release it."""
        self.release()

    def release(self) -> None:
        """Release it; may be called twice."""
        self._held.close()


def reserve_server_ports() -> tuple[ReservedPort, ReservedPort, ReservedPort]:
    """Return the ports of a `slime_core.protocols.Site`."""
    return ReservedPort(), ReservedPort(), ReservedPort(in_a_row=_IN_A_ROW)


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


def interface_of(address: str) -> str | None:
    """Return the name of the network interface of this host that has an IPv4 address, `eth0` for example; None where none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
            # struct ifreq: a name of 16 bytes; from the 20th on, the address of the answer. One without an address is an error.
            told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("16s240x", os.fsencode(name)))
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return None


def address_towards(address: str) -> str:
    """Return the IPv4 address of this host by which it reaches `host:port`.

    Raises:
        OSError: there is no way.
    """
    host, _, port = address.rpartition(":")
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # looks for a way, and sends nothing
        return str(probe.getsockname()[0])


def _bound(port: int) -> socket.socket:
    """Return a socket at a port of all addresses, or at any free one for 0, which does not listen."""
    has_ipv6 = socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if has_ipv6 else socket.AF_INET)
    try:
        if has_ipv6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except BaseException:
        bound.close()
        raise
    # Once it is bound: a server may take the port, while another socket that is being reserved may not.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


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
