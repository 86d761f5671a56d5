"""Jobs on a candidate: compiling its launches, and running it in Triton's interpreter under watch."""

from __future__ import annotations

import builtins
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import language
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.runtime import driver, interpreter
from triton.runtime.cache import triton_key

from slime_kernels.sandbox import libdevice
from slime_kernels.sandbox.interpreted import Interpreted
from slime_kernels.sandbox.offline_driver import TARGETS, OfflineDriver, resources
from slime_kernels.sandbox.problem_jobs import build
from slime_kernels.sandbox.values import decode, encode, tensors_of
from slime_kernels.sandbox.watch import Watch

assert CUDABackend  # imported before the fork, and not once an evaluation
assert gluon  # which the first launch would import
CANDIDATE = "/box/candidate.py"


def prepare() -> None:
    """Do once what the first use of torch and Triton does."""
    triton_key()  # reads all of Triton's files
    torch.manual_seed(0)
    with torch.no_grad(), Watch(Interpreted()):
        torch.empty(4).clone()


class TamperError(Exception):
    """The candidate changed something of torch, Triton or Python."""


def load(code: str) -> dict[str, Any]:
    """Run a candidate's module; its source is a file, as Triton reads it again."""
    Path(CANDIDATE).write_text(code)
    module = sys.modules["candidate"] = types.ModuleType("candidate")  # where dataclasses look
    module.__file__ = CANDIDATE
    exec(compile(code, CANDIDATE, "exec"), vars(module))
    return vars(module)


def compile_for_targets(
    header: dict[str, Any], buffers: Sequence[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    """Call `ModelNew` once where launches compile and do nothing; returns launches, and each kernel's resources by target.

    What it computes from the kernels' results is not to be relied on; errors of its own from that are not told apart.
    """
    first, *others = header["targets"]
    offline = OfflineDriver(first)
    driver.set_active(offline)
    names = load(header["code"])
    trial = header["trial"]
    given, inputs = decode(trial["given"], buffers), decode(trial["inputs"], buffers)
    with torch.no_grad():
        model = build(names["ModelNew"], given, trial)
        model(*inputs)
    kernels = []
    folder = Path("/box")
    for source, metadata in offline.sources:
        options = {"num_warps": metadata.num_warps, "num_stages": metadata.num_stages}
        built = {first: triton.compile(source, target=TARGETS[first][0], options=options)}
        for target in others:
            built[target] = triton.compile(source, target=TARGETS[target][0], options=options)
        kernels.append(
            {
                "name": metadata.name,
                "warps": metadata.num_warps,
                "targets": {name: resources(one, name, folder) for name, one in built.items()},
            }
        )
    return {"kernels": kernels, "launches": offline.launches}, []


def interpret(header: dict[str, Any], buffers: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Run `ModelNew` on the inputs of each trial in the interpreter; returns its answers and what was seen of it.

    With `sampled_programs` only so many programs of each launch are run, for their cost; the answers are then none.
    """
    offline = OfflineDriver("sm_90")  # asked for how to time, by autotuning
    driver.set_active(offline)
    interpreted = Interpreted(header.get("sampled_programs"), counts=lambda: not offline.timing)
    interpreted.install()
    libdevice.install()
    before = _surroundings()
    names = load(header["code"])
    out: list[bytes] = []
    trials: list[dict[str, Any]] = []
    model, inputs, group = None, [], None
    for trial in header["trials"]:
        fresh = decode(trial["inputs"], buffers)
        if group != trial["group"]:
            group, inputs = trial["group"], fresh
            model = build(names["ModelNew"], decode(trial["given"], buffers), trial)
        else:  # other numbers in the same memory: an answer that is kept for an address is wrong
            assert model is not None
            for ours, new in zip(tensors_of(inputs), tensors_of(fresh), strict=True):
                ours.copy_(new)
        before_call = [] if interpreted.samples else _bytes(inputs)
        with torch.no_grad(), interpreted.recording() as launches, Watch(interpreted) as watch:
            torch.manual_seed(trial["seed"])
            result = model(*inputs)
        seen: dict[str, Any] = {"launches": launches, "delegated": watch.delegated}
        if not interpreted.samples:
            seen["mutated"] = _bytes(inputs) != before_call
            seen["outputs"] = watch.outputs(result)
            seen["answer"] = encode(result, out)
        trials.append(seen)
    if changed := _changed(before):
        raise TamperError(f"changed {', '.join(changed[:5])}")
    return {"trials": trials}, out


def _bytes(value: Any) -> list[bytes]:
    buffers: list[bytes] = []
    encode(value, buffers)
    return buffers


def _surroundings() -> dict[str, dict[str, int]]:
    """Return the identities of everything in the modules and classes that a candidate could change for its good."""
    owners: list[Any] = [
        torch,
        torch.nn,
        torch.nn.functional,
        torch.Tensor,
        torch.nn.Module,
        torch.cuda,
        time,
    ]
    owners += [
        builtins,
        triton,
        language,
        interpreter,
        interpreter.GridExecutor,
        interpreter.InterpretedFunction,
    ]
    return {owner.__name__: {name: id(one) for name, one in vars(owner).items()} for owner in owners}


def _changed(before: Mapping[str, Mapping[str, int]]) -> list[str]:
    after = _surroundings()
    return [
        f"{owner}.{name}"
        for owner, names in before.items()
        for name, one in names.items()
        if after[owner].get(name) != one
    ]
