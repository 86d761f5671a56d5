"""A function for `--custom-megatron-before-train-step-hook-path`: rank 1 is killed in step 3, the others go on into a collective."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist


def die(step: int, optimizer_step: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
