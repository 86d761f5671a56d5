"""Patches that let SGLang run on a machine without CUDA. Every change to foreign code that this package makes is here.

SGLang 0.5.23 names CUDA in three places where it means "the device", starts its processes in the one way that CUDA allows, does not
divide experts or attention between ranks in PyTorch alone, and does not let a paused scheduler sleep. SGLang itself calls `install` at the start of each of its processes
(entry-point group `sglang.srt.plugins`), and `install_in_worker` in those that have a model; no other process is changed, and none
that sees a GPU. On any machine, a process that starts after its parent has exited ends itself, and shared memory is named so that it
goes with the server: SGLang deletes none of it where it is killed.
A patch writes one line to the server's log when it is first taken. A test reads it there, and so fails once SGLang
no longer needs the patch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import logging
import multiprocessing
import os
import pkgutil
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from slime_core.errors import EngineError
from slime_core.runtime.processes.server_process import SCRATCH_VARIABLE

from slime_sglang.inside.device import is_active

#: SGLang versions that the patches are written for: at least the first, below the second.
SGLANG_VERSIONS = ("0.5.23", "0.6")

_log = logging.getLogger(__name__)
_set_start_method = multiprocessing.set_start_method
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Patch:
    """One attribute that is replaced in SGLang's processes."""

    name: str
    """Its dotted name."""
    reason: str
    """Who calls it, and what happens without the patch."""
    answer: Callable[..., Any]
    """What takes its place; where it returns `NotImplemented`, SGLang's own is called."""

    @property
    def log_line(self) -> str:
        """Return what is logged when the patch is first taken."""
        return f"{self.name} answered for the CPU: {self.reason}"


PATCHES = (
    Patch(
        "torch.cuda.synchronize",
        "/release_memory_occupation synchronizes torch.get_device_module(), which is torch.cuda in a CUDA build of "
        "PyTorch even without a GPU, and the exception ends the server "
        "(sglang/srt/managers/scheduler_components/weight_updater.py)",
        lambda device=None: None,
    ),
    Patch(
        "torch.Tensor.cuda",
        "/weights_checker with action compare moves each weight to the GPU to compare it there, and is refused "
        "(sglang/srt/utils/weight_checker_comparator.py)",
        lambda self, *args, **kwargs: self,
    ),
    Patch(
        "torch.cuda.cudart",
        "--enable-return-routed-experts keeps experts in host memory that it registers with CUDA, for a device to "
        "copy to, and the exception ends the server (sglang/srt/mem_cache/pool_host/common.py)",
        lambda: SimpleNamespace(cudaHostRegister=lambda pointer, n_bytes, flags: 0),
    ),
    Patch(
        "multiprocessing.set_start_method",
        "SGLang spawns its processes, as CUDA allows no forks, and each imports for 9 s of CPU time what the one that "
        "starts them has imported (sglang/srt/entrypoints/engine.py)",
        lambda method, force=False: _set_start_method("fork", force=True),
    ),
)


def _own_experts_alone(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    """Add up what SGLang's own says of each token's experts that this rank has: of their n-th ones, for each n."""
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native.__wrapped__
    weights, ids = topk_output.topk_weights, topk_output.topk_ids
    if (ids >= 0).all():
        return NotImplemented
    sums = x.new_zeros(x.shape)
    for n in range(ids.shape[1]):
        rows = (ids[:, n] >= 0).nonzero()[:, 0]
        if len(rows):
            own = topk_output._replace(topk_weights=weights[rows, n : n + 1], topk_ids=ids[rows, n : n + 1])
            sums[rows] += forward(layer, x[rows], own, config)
    return sums


def _sleep_while_paused(scheduler: Any) -> Any:
    """Wait for a request as an idle scheduler does, then do what SGLang does."""
    if scheduler.idle_sleeper is None:
        return NotImplemented
    scheduler.maybe_sleep_on_idle()
    return type(scheduler)._record_scheduler_state_for_paused_engine.__wrapped__(scheduler)


#: Of processes that compute; their modules are imported by then.
WORKER_PATCHES = (
    Patch(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        "in spite of --sleep-on-idle a scheduler that is paused asks for requests without a pause, and keeps a core busy that the trainer and "
        "weight updates want (sglang/srt/managers/scheduler.py)",
        _sleep_while_paused,
    ),
    Patch(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        "with --ep-size it gets -1 for experts that other ranks have, which it takes for an index, and the exception ends the server "
        "(sglang/srt/layers/moe/fused_moe_native.py)",
        _own_experts_alone,
    ),
)


def install() -> None:
    """Apply the patches if this process of SGLang runs on the platform `cpu_torch`; exit if its parent has exited.

    Raises:
        EngineError: the patches are not written for the installed SGLang.
    """
    _end_without_parent()
    if scratch := os.environ.get(SCRATCH_VARIABLE):
        _name_shared_memory(os.path.basename(scratch))
    if not is_active():
        return
    check_version(importlib.metadata.version("sglang"))
    for patch in PATCHES:
        _apply(patch)
    _tie_forks()


def install_in_worker() -> None:
    """Apply the patches of processes that compute."""
    for patch in WORKER_PATCHES:
        _apply(patch)
    _pad_as_on_a_cpu()


def _pad_as_on_a_cpu() -> None:
    """Have ranks with attention of their own (`--attn-dp-size`) pad and gather batches as on SGLang's own CPU platform.

    On any other they would pin memory, call Triton, gather by operators that are registered for a GPU, and ask the attention for the
    length of sequences that pad a batch by another name.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = parallel_state._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _end_without_parent() -> None:
    """End this process if its parent ended before SGLang asked the kernel to end the two together; it would stay for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def _name_shared_memory(name: str) -> None:
    """Have the name of a server's scratch folder in those of its shared memory: its loads, and its queues and images."""
    from sglang.srt.server_args import PortArgs
    from sglang.srt.utils import stale_shm_cleanup

    init_new = PortArgs.init_new

    @functools.wraps(init_new)
    def named(*args: Any, **kwargs: Any) -> PortArgs:
        return dataclasses.replace(init_new(*args, **kwargs), instance_id=name)

    PortArgs.init_new = staticmethod(named)
    stale_shm_cleanup._SGL_SHM_PREFIX = f"sgl_shm_{name}"


def _tie_forks() -> None:
    """Have each fork of this process end with it from its first moment on: SGLang asks the kernel for that, but later."""
    parent, libc = [0], ctypes.CDLL(None)

    def note() -> None:
        parent[0] = os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent[0]:
            os._exit(1)

    os.register_at_fork(before=note, after_in_child=tie)


def check_version(version: str) -> None:
    """Refuse a version of SGLang that the patches are not written for."""
    first, end = SGLANG_VERSIONS
    if not _parts(first) <= _parts(version) < _parts(end):
        raise EngineError(
            f"slime_sglang.inside.compat: found sglang {version}; the patches for machines without a GPU are written for at "
            f"least {first} and below {end}; install one of these"
        )


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _apply(patch: Patch) -> None:
    owner_name, _, attribute = patch.name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, attribute)
    log_once = functools.cache(_log.info)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        answer = patch.answer(*args, **kwargs)
        if answer is NotImplemented:
            return original(*args, **kwargs)
        log_once(patch.log_line)
        return answer

    setattr(owner, attribute, replacement)
