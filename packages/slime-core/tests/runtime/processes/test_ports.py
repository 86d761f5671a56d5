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
    held = [port for _ in range(40) for port in reserve_server_ports("0.0.0.0")]
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


def test_a_row_is_sought_beside_a_port_at_which_another_process_listens(monkeypatch):
    taken = ReservedPort()
    real, starts = socket.socket.bind, [taken.number - 13]

    def bind(self, address):
        """Have the first search begin where its last port is the one that is taken, if nobody has its first."""
        if address[1] == 0 and starts:
            with contextlib.suppress(OSError):
                return real(self, (address[0], starts.pop()))
        return real(self, address)

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", taken.number))
        listener.listen()
        monkeypatch.setattr(socket.socket, "bind", bind)
        row = ReservedPort(in_a_row=14)
        monkeypatch.undo()
    assert not starts
    assert taken.number not in range(row.number, row.number + 14)
    row.release()
    taken.release()


def test_a_host_without_as_many_ports_in_a_row_is_an_error(monkeypatch):
    monkeypatch.setattr(ports, "_TRIES", 2)
    with pytest.raises(OSError, match="found no 70000 free TCP ports in a row"):
        ReservedPort(in_a_row=70000)
