"""`python rank_processes.py FD ...`: import Megatron, fork a process for each pipe, and let it serve jobs of `rank_jobs`."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from slime_megatron import compat


def serve(connection: Connection) -> None:
    """Answer jobs until the pipe is closed."""
    import rank_jobs

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            meeting, rank, name, world_size, arguments = pickle.loads(connection.recv_bytes())
            job = getattr(rank_jobs, name)
            connection.send_bytes(pickle.dumps(answer(meeting, rank, world_size, job, arguments)))


def answer(
    meeting: str, rank: int, world_size: int, job: Any, arguments: dict[str, Any]
) -> tuple[str | None, Any]:
    """Return (traceback or None, what the job returned)."""
    try:
        store = dist.FileStore(meeting, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()  # a rank whose job ends at once must not leave while others still connect
        return None, job(**arguments)
    except Exception:
        return traceback.format_exc(), None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(pipes: list[int]) -> None:
    """Fork the processes; end them when this one is told to end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    compat.install()
    children = []
    for own in pipes:
        child = os.fork()
        if child == 0:
            for other in pipes:
                if other != own:
                    os.close(other)
            serve(Connection(own))
            os._exit(0)
        children.append(child)
    for pipe in pipes:
        os.close(pipe)

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main([int(pipe) for pipe in sys.argv[1:]])
