"""A function for `--custom-megatron-before-train-step-hook-path`: rank 1 is killed in step 3, the others go on into a collective."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist


def die(step: int, optimizer_step: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingLoss:
    """The critic's loss, for `--value-loss-type`; rank 1 is killed in its call of the number that `DIES_IN` says."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, view: Any, returns: Any) -> Any:
        from slime_algos.losses.value import value_loss

        self._calls += 1
        if dist.get_rank() == 1 and str(self._calls) == os.environ.get("DIES_IN"):
            os.kill(os.getpid(), signal.SIGKILL)
        return value_loss(view, returns)


value_loss = DyingLoss()


class DyingPass:
    """For `--custom-megatron-before-log-prob-hook-path`; rank 1 is killed before its pass of the teacher that `DIES_IN` says."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, model: Any, role: str) -> None:
        self._calls += role == "teacher"
        if role == "teacher" and dist.get_rank() == 1 and str(self._calls) == os.environ.get("DIES_IN"):
            os.kill(os.getpid(), signal.SIGKILL)


before_log_prob = DyingPass()
