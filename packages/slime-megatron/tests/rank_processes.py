"""`python rank_processes.py FD ...`: import Megatron, and serve each pipe's jobs of `rank_jobs`, each in a process of its own.

A process that served several would keep the threads of worlds that are over: Megatron's hooks on gradients hold groups in
cycles that Python cannot see, and gloo's threads spin when their peers are gone.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
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
from host_copies import on_host
from slime_megatron import compat

#: Exit statuses of a process that served a job, and of one whose pipe was closed before.
_SERVED, _CLOSED = 0, 3


def has_gpu() -> bool:
    """Return whether each process has a GPU, as `Ranks` says. torch is not asked: a process that has used CUDA must not fork."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def serve(pipe: int, number: int) -> int:
    """Answer a job in the process `number`, which has the GPU of that number if any; returns the exit status."""
    if has_gpu():
        torch.cuda.set_device(number)
    compat.install()
    import rank_jobs

    connection = Connection(pipe)
    try:
        meeting, rank, name, world_size, arguments = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return _CLOSED
    job = getattr(rank_jobs, name)
    connection.send_bytes(pickle.dumps(answer(meeting, rank, world_size, job, arguments)))
    return _SERVED


def answer(
    meeting: str, rank: int, world_size: int, job: Any, arguments: dict[str, Any]
) -> tuple[str | None, Any]:
    """Return (traceback or None, what the job returned)."""
    try:
        store = dist.FileStore(meeting, world_size)
        backend = "nccl" if has_gpu() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        dist.barrier()  # a rank whose job ends at once must not leave while others still connect
        return None, on_host(job(**arguments))
    except Exception:
        return traceback.format_exc(), None


def fork(pipe: int, number: int, pipes: list[int]) -> int:
    """Return the id of a new process that answers the next job of a pipe."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in pipes:
            if other != pipe:
                os.close(other)
        status = 1
        try:
            status = serve(pipe, number)
        finally:
            os._exit(status)
    return child


def main(pipes: list[int]) -> None:
    """Keep a process for each pipe that is open; end them when this one is told to end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    numbers = {pipe: number for number, pipe in enumerate(pipes)}
    if not has_gpu():  # else what is imported may ask for the GPU
        compat.install()
        import rank_jobs  # noqa: F401  # before it forks, so that it is imported once

    # torch looks for backends in the metadata of all that is installed, which takes a process a fifth of its job.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    importlib.metadata.entry_points(group="torch.distributed.backends")
    gc.freeze()  # a collection in a process would copy, and look through, all that is imported

    serving: dict[int, int] = {}

    def end(*_: object) -> None:
        for child in serving:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for pipe in pipes:
        serving[fork(pipe, numbers[pipe], pipes)] = pipe
    while serving:
        child, status = os.wait()
        pipe = serving.pop(child)
        if os.waitstatus_to_exitcode(status) == _SERVED:
            serving[fork(pipe, numbers[pipe], pipes)] = pipe
        else:  # whoever waits for its answer sees the pipe's end
            pipes.remove(pipe)
            os.close(pipe)


if __name__ == "__main__":
    main([int(pipe) for pipe in sys.argv[1:]])
