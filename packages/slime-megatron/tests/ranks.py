"""Processes that run jobs of `rank_jobs.py` as the ranks of worlds: started once, each world anew."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Seconds that jobs may take, and the processes to start.
DEADLINE_S = 240


class Job(NamedTuple):
    """A function of `rank_jobs`, the ranks of the world that it is to run in, and its arguments."""

    name: str
    world_size: int
    arguments: dict[str, Any]


class Ranks:
    """`n` processes that one process forks when it has imported Megatron, so that they start as fast as one.

    Where there are as many GPUs each has one, and worlds are NCCL's. With fewer all compute on the CPU, in worlds of gloo: NCCL refuses
    two ranks on one GPU.

    Args:
        n: number of processes.
        folder: where worlds meet.
    """

    def __init__(self, n: int, folder: Path) -> None:
        self._n, self._folder = n, folder
        #: Whether each rank has a GPU of its own.
        self.on_gpus = torch.cuda.device_count() >= n
        self._start()

    def run(self, name: str, world_size: int, **arguments: Any) -> list[Any]:
        """Run one job; return what each of its ranks returned."""
        return self.run_all([Job(name, world_size, arguments)])[0]

    def _start(self) -> None:
        pairs = [Pipe() for _ in range(self._n)]
        script = Path(__file__).with_name("rank_processes.py")
        ends = [theirs.fileno() for _, theirs in pairs]
        self._parent = subprocess.Popen(
            [sys.executable, str(script), *map(str, ends)],
            pass_fds=ends,
            env={**os.environ, "OMP_NUM_THREADS": "1"}
            | ({} if self.on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        )
        self._connections = [ours for ours, _ in pairs]
        for _, theirs in pairs:
            theirs.close()

    def run_all(self, jobs: list[Job]) -> list[list[Any]]:
        """Run jobs at the same time, each in a world of its own; return what each rank of each job returned.

        Raises:
            AssertionError: a rank raised, and its traceback; or one did not answer within the deadline.
        """
        try:
            return self._run_all(jobs)
        except AssertionError:  # ranks that wait for the one that failed are of no use to the next test
            self.close()
            self._start()
            raise

    def _run_all(self, jobs: list[Job]) -> list[list[Any]]:
        first, spans = 0, []
        for job in jobs:
            meeting = tempfile.mktemp(dir=self._folder)
            spans.append(self._connections[first : (first := first + job.world_size)])
            for rank, connection in enumerate(spans[-1]):
                connection.send_bytes(pickle.dumps((meeting, rank, *job)))
        answers: dict[Connection, Any] = {}
        waiting = [connection for span in spans for connection in span]
        deadline = time.monotonic() + DEADLINE_S
        while waiting:
            ready = wait(waiting, timeout=deadline - time.monotonic())
            assert ready, f"{len(waiting)} ranks did not answer within {DEADLINE_S} s"
            for connection in ready:
                try:
                    error, answers[connection] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    error = "its process ended"
                assert error is None, f"a rank raised:\n{error}"
                waiting.remove(connection)
        return [[answers[connection] for connection in span] for span in spans]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        self._parent.terminate()
        self._parent.wait()
