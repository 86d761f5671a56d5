"""Jobs on a candidate: compiling its launches, and running it under watch, in Triton's interpreter."""

from __future__ import annotations

import builtins
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import language
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.runtime import driver, interpreter, jit
from triton.runtime.cache import triton_key

from slime_kernels.sandbox import libdevice
from slime_kernels.sandbox.guards import Guards
from slime_kernels.sandbox.interpreted import Interpreted
from slime_kernels.sandbox.offline_driver import TARGETS, OfflineDriver, resources
from slime_kernels.sandbox.problem_jobs import build
from slime_kernels.sandbox.values import decode, encode, tensors_of
from slime_kernels.sandbox.watch import Watch, WatchedWork

assert CUDABackend  # imported before the fork, and not once an evaluation
assert gluon  # which the first launch would import
CANDIDATE = "/box/candidate.py"
#: This package.
_OURS = __name__.partition(".")[0]
#: What Python adds to modules and classes by itself, when it first warns there or is asked for annotations.
_MADE_BY_PYTHON = frozenset({"__warningregistry__", "__annotations__", "__annotations_cache__"})


def prepare() -> None:
    """Do once what the first use of torch and Triton does."""
    triton_key()  # reads all of Triton's files
    torch.manual_seed(0)
    with torch.no_grad(), Watch(Interpreted()):
        torch.empty(4).clone()


class TamperError(Exception):
    """The candidate changed something of torch, Triton, Python or this evaluator."""


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

    Raises:
        InputsError: there is no memory for the inputs at this size; nothing of the candidate was run.
    """
    first, *others = header["targets"]
    offline = OfflineDriver(first)
    driver.set_active(offline)
    trial = header["trial"]
    given, inputs = decode(trial["given"], buffers), decode(trial["inputs"], buffers)
    names = load(header["code"])
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
    return try_trials(header, buffers, interpreted)


def try_trials(
    header: dict[str, Any],
    buffers: Sequence[bytes],
    work: WatchedWork,
    *,
    device: str = "cpu",
    settle: Callable[[], object] = lambda: None,
    guards: Guards | None = None,
) -> tuple[dict[str, Any], list[bytes]]:
    """Run `ModelNew` on the inputs of each trial under watch, and return its answers and what was seen of it.

    Args:
        header: `code` and `trials`.
        buffers: of the inputs.
        work: launches its kernels.
        device: where tensors are.
        settle: waits for all that the device was given.
        guards: between which all that it is given and makes lies, where nothing checks addresses.

    Raises:
        TamperError: something of torch, Triton or Python is not what it was.
        BoundsError: a kernel wrote outside its tensors.
    """
    before = surroundings()
    names = load(header["code"])
    out: list[bytes] = []
    trials: list[dict[str, Any]] = []
    model, inputs, group = None, [], None
    for trial in header["trials"]:
        fresh = moved(decode(trial["inputs"], buffers), device)
        if group != trial["group"]:
            group, inputs = trial["group"], fresh if guards is None else guards.placed(fresh)
            given = moved(decode(trial["given"], buffers), device)
            model = build(names["ModelNew"], given, trial)
            check_surroundings(before)
            model = on_device(model, device)
            if guards is not None:
                guards.place_weights(model)
        else:  # other numbers in the same memory: an answer that is kept for an address is wrong
            assert model is not None
            for ours, new in zip(tensors_of(inputs), tensors_of(fresh), strict=True):
                ours.copy_(new)
        before_call = [] if work.samples else _bytes(inputs)
        with torch.no_grad(), work.recording() as launches, Watch(work, guards) as watch:
            torch.manual_seed(trial["seed"])
            result = model(*inputs)
            check_surroundings(before, result)  # what it changed, it could put back while its answer is read
            settle()
        if guards is not None:
            guards.check()
        seen: dict[str, Any] = {"launches": launches, "delegated": watch.delegated}
        if not work.samples:
            seen["mutated"] = _bytes(inputs) != before_call
            seen["outputs"] = watch.outputs(result)
            seen["answer"] = encode(result, out)
        trials.append(seen)
    return {"trials": trials}, out


def moved(value: Any, device: str) -> Any:
    """Return a value whose tensors are on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(moved(one, device) for one in value)
    return value


def on_device(model: Any, device: str) -> Any:
    """Return a module with its weights on a device."""
    return model.to(device) if isinstance(model, torch.nn.Module) else model


def _bytes(value: Any) -> list[bytes]:
    buffers: list[bytes] = []
    encode(value, buffers)
    return buffers


def surroundings() -> dict[str, dict[str, int]]:
    """Return the identities of everything in the modules and classes that a candidate could change for its good.

    Of `torch.cuda`, which notes there what it has done, those of what can be called; of other modules all but their submodules.
    """
    found = {name: _identities(owner) for name, owner in _owners().items()}
    calls = {name: id(one) for name, one in vars(torch.cuda).items() if callable(one)}
    return found | {torch.cuda.__name__: calls}


def _owners() -> dict[str, Any]:
    """Return modules and classes by name: of torch, Triton and Python what answers for a candidate, and of this evaluator all."""
    owners: list[Any] = [
        torch,
        torch.nn,
        torch.nn.functional,
        torch.Tensor,
        torch.nn.Parameter,
        torch.nn.Module,
        torch.cuda.Event,
        torch.cuda.Stream,
        time,
        builtins,
        triton,
        language,
        interpreter,
        interpreter.GridExecutor,
        interpreter.InterpretedFunction,
        jit.JITFunction,
    ]
    found = {owner.__name__: owner for owner in owners}
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == _OURS]:
        found[module.__name__] = module
        found |= {
            f"{module.__name__}.{name}": one
            for name, one in vars(module).items()
            if isinstance(one, type) and one.__module__ == module.__name__
        }
    return found


def _identities(owner: Any) -> dict[str, int]:
    return {
        name: id(one)
        for name, one in vars(owner).items()
        if not isinstance(one, types.ModuleType) and name not in _MADE_BY_PYTHON
    }


def _acts(value: Any) -> bool:
    """Return whether an attribute is called, or stands in for one of the objects of its class."""
    return callable(value) or hasattr(type(value), "__get__")


def check_surroundings(before: Mapping[str, Mapping[str, int]], answer: Any = None) -> None:
    """Check that everything is as it was, and that no tensor of an answer has attributes of its own, which would be asked in torch's place.

    Args:
        before: as `surroundings` returned it.
        answer: what a candidate answered.

    Raises:
        TamperError: something was changed, added or taken away.
    """
    after = surroundings()
    held = {name: vars(owner) for name, owner in _owners().items()} | {torch.cuda.__name__: vars(torch.cuda)}
    changed = [
        f"{owner}.{name}"
        for owner, names in before.items()
        for name in sorted(names.keys() | after.get(owner, {}).keys())
        if after.get(owner, {}).get(name) != names.get(name)
        # Libraries may note something at first use; what is added and does nothing takes nothing's place.
        and (name in names or _acts(held[owner][name]))
    ]
    changed += [f"{name} of a tensor" for one in tensors_of(answer) for name in vars(one)]
    if changed:
        raise TamperError(f"changed {', '.join(changed[:5])}")
