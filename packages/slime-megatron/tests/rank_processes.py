"""`python rank_processes.py ADDRESS N`: import Megatron, fork N processes, and let each serve jobs of `rank_jobs`."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist
from slime_megatron import compat


def serve(address: str) -> None:
    """Answer jobs until the connection is closed."""
    import rank_jobs

    with (
        Client(address, family="AF_UNIX") as connection,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        while True:
            meeting, rank, name, world_size, arguments = pickle.loads(connection.recv_bytes())
            connection.send_bytes(
                pickle.dumps(answer(meeting, rank, world_size, getattr(rank_jobs, name), arguments))
            )


def answer(
    meeting: str, rank: int, world_size: int, job: Any, arguments: dict[str, Any]
) -> tuple[str | None, Any]:
    """Return (traceback or None, what the job returned)."""
    try:
        store = dist.FileStore(meeting, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        return None, job(**arguments)
    except Exception:
        return traceback.format_exc(), None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(address: str, n: int) -> None:
    """Fork the processes; end them when this one is told to end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    compat.install()
    children = []
    for _ in range(n):
        child = os.fork()
        if child == 0:
            serve(address)
            os._exit(0)
        children.append(child)

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
