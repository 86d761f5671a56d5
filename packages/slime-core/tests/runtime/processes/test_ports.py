"""Reserved TCP ports: nobody else is given them, a server can listen there, and ports in a row are as many."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from slime_core.runtime.processes import ports
from slime_core.runtime.processes.ports import ReservedPort, reserve_server_ports


def listen(port: int) -> None:
    """Listen at a port for a moment."""

    async def main():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
        server.close()

    asyncio.run(main())


def test_a_port_that_is_held_is_given_to_nobody_else_and_can_be_listened_on():
    held = [ReservedPort() for _ in range(300)]
    assert len({port.number for port in held}) == 300
    listen(held[0].number)
    for one in held:
        one.release()
        one.release()


def test_ports_in_a_row_of_several_reservations_are_apart_and_each_can_be_listened_on():
    held = [port for _ in range(40) for port in reserve_server_ports()]
    numbers = [port.number for port in held]
    rows = [set(range(number, number + 14)) for number in numbers[2::3]]
    singles = set(numbers) - set(numbers[2::3])
    assert len(singles) == 80
    assert len(singles.union(*rows)) == 80 + 40 * 14
    for port in sorted(rows[0]):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        listen(port)
    for one in held:
        one.release()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::"])
def test_a_reserved_port_is_free_at_no_address_and_a_server_can_listen_at_all_of_them(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with ReservedPort() as port:
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port.number))
        everywhere = (
            {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        )
        with socket.create_server(("", port.number), **everywhere):
            socket.create_connection(("127.0.0.1", port.number), timeout=5).close()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_row_is_sought_beside_a_port_at_which_another_process_listens(monkeypatch, address):
    with socket.create_server((address, 0)) as listener:
        taken = listener.getsockname()[1]
        real, starts = socket.socket.bind, [taken - 13]

        def bind(self, address):
            """Have the first search begin where its last port is the one that is taken, if nobody has its first."""
            if address[1] == 0 and starts:
                with contextlib.suppress(OSError):
                    return real(self, (address[0], starts.pop()))
            return real(self, address)

        monkeypatch.setattr(socket.socket, "bind", bind)
        with ReservedPort(in_a_row=14) as row:
            assert not starts
            assert taken not in range(row.number, row.number + 14)


def test_a_host_without_as_many_ports_in_a_row_is_an_error(monkeypatch):
    monkeypatch.setattr(ports, "_TRIES", 2)
    with pytest.raises(OSError, match="found no 70000 free TCP ports in a row"):
        ReservedPort(in_a_row=70000)
