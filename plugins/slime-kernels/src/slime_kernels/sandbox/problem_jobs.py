"""Jobs on a problem: its inputs, what its module answers, and what is to be known of it once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from slime_kernels.problems.constants import whole_numbers, with_numbers
from slime_kernels.sandbox.eager_cost import EagerCost, OneAttention
from slime_kernels.sandbox.values import decode, encode

#: What whole numbers of a module are capped to, to make it small; the first that its reference runs with is taken.
_CAPS = (33, 32, 20, 16, 8, 64)
#: In one shape more for each of the largest numbers: it as it is, up to so much, and all others capped low. Blocks of kernels are
#: larger than what is small, and what they do in their second pass is to be seen.
_LONG, _LOW, _N_LONG = 2500, (7, 8, 16), 2
#: Whole numbers that are not sizes, as a rule: kernel sizes, strides, numbers of heads.
_LEAST_CAPPED = 9
#: Bytes of the inputs and the answers of a trial in a shape that is found: all trials of a candidate travel in one message, and the
#: interpreter keeps nine bytes for each byte of its tensors.
_MOST_BYTES = 16 << 20


def load(code: str, constants: Mapping[str, int]) -> dict[str, Any]:
    """Run a problem's module, with other values of its module-level integers, and return its names."""
    names: dict[str, Any] = {"__name__": "problem"}
    exec(compile(with_numbers(code, constants), "problem.py", "exec"), names)
    return names


def make_inputs(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Draw the inputs of each trial (`constants`, `dtype`, `seed`, `scale`)."""
    out: list[bytes] = []
    trials = []
    for trial in header["trials"]:
        names = load(header["code"], trial["constants"])
        torch.manual_seed(trial["weights"])
        given = names["get_init_inputs"]()
        torch.manual_seed(trial["seed"])
        inputs = [_cast(one, trial["dtype"], trial["scale"]) for one in names["get_inputs"]()]
        trials.append({"inputs": encode(inputs, out), "given": encode(given, out)})
    return {"trials": trials}, out


def _cast(value: Any, dtype: str, scale: float) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return (value * scale).to(getattr(torch, dtype))
    return value


def answer(header: dict[str, Any], buffers: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Return what `Model` answers to the inputs of each trial."""
    out: list[bytes] = []
    answers = []
    for trial in header["trials"]:
        names = load(header["code"], trial["constants"])
        model = build(names["Model"], decode(trial["given"], buffers), trial)
        with torch.no_grad():
            torch.manual_seed(trial["seed"])
            answers.append(encode(model(*decode(trial["inputs"], buffers)), out))
    return {"answers": answers}, out


def build(model: Any, given: Sequence[Any], trial: Mapping[str, Any]) -> Any:
    """Return a module of a trial, its weights drawn from the seed that trials of a shape and a type share."""
    torch.manual_seed(trial["weights"])
    built = model(*given)
    if trial["dtype"] != "float32" and isinstance(built, torch.nn.Module):
        built = built.to(getattr(torch, trial["dtype"]))
    return built


def facts(header: dict[str, Any], _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Return shapes in which a problem is small, its inputs' shapes as it is, what it costs eagerly, and whether it may be scaled."""
    code = header["code"]
    shapes = list(header["shapes"]) or _small_shapes(code)
    if not shapes:
        raise ValueError("the module runs in no shape that is small enough; give its row `shapes`")
    for shape in shapes:
        _run(code, shape)
    return {"shapes": shapes, "scalable": _scalable(code, shapes[0])} | _whole(code), []


def _small_shapes(code: str) -> list[dict[str, int]]:
    sizes = {name: value for name, value in whole_numbers(code).items() if value >= _LEAST_CAPPED}
    found = _first_that_runs(code, ({name: min(size, cap) for name, size in sizes.items()} for cap in _CAPS))
    for long in sorted(sizes, key=sizes.__getitem__, reverse=True)[:_N_LONG] if found else ():
        low = (
            {name: min(size, _LONG if name == long else cap) for name, size in sizes.items()} for cap in _LOW
        )
        found += [shape for shape in _first_that_runs(code, low) if shape not in found]
    return found


def _first_that_runs(code: str, shapes: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    for shape in shapes:
        try:
            _run(code, shape, most_bytes=_MOST_BYTES)
        except Exception:  # a module that wants other relations between its sizes, or is still large
            continue
        return [shape]
    return []


def _run(code: str, shape: Mapping[str, int], scale: float = 1.0, *, most_bytes: float = math.inf) -> Any:
    """Return what a module answers in a shape; raises ValueError where its inputs and answers have more bytes."""
    names = load(code, shape)
    if most_bytes < math.inf and _n_bytes(_without_memory(names["get_inputs"], least=True)) > most_bytes:
        raise ValueError("inputs that are too large")
    torch.manual_seed(0)
    model = names["Model"](*names["get_init_inputs"]())
    inputs = [_cast(one, "float32", scale) for one in names["get_inputs"]()]
    with torch.no_grad():
        answer = model(*inputs)
    if _n_bytes(inputs) + _n_bytes(answer) > most_bytes:
        raise ValueError("an answer that is too large")
    return answer


def _n_bytes(value: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors(value))


def _without_memory(make: Callable[[], Any], *, least: bool = False) -> Any:
    """Return what a function makes, its tensors without memory.

    Args:
        make: makes tensors; where it reads numbers of them, as drawing from some distributions does, it makes them for real.
        least: return nothing then.
    """
    distribution = torch.distributions.Distribution
    validates = distribution._validate_args
    distribution.set_default_validate_args(False)  # which reads numbers
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return [] if least else _on_meta(make())
    finally:
        distribution.set_default_validate_args(validates)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return value.to("meta")
    return type(value)(map(_on_meta, value)) if isinstance(value, list | tuple) else value


def _scalable(code: str, shape: Mapping[str, int]) -> bool:
    """Return whether the module answers with finite numbers where its inputs are larger."""
    try:
        answers = encode(_run(code, shape, 1.5), [], content=False)
        return bool(answers) and all(
            bool(torch.isfinite(one).all()) for one in _tensors(_run(code, shape, 1.5))
        )
    except Exception:  # a module that wants probabilities, say
        return False


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _whole(code: str) -> dict[str, Any]:
    """Return the shapes of the inputs at full size and the cost of the module, without its memory."""
    names = load(code, {})
    given = _without_memory(names["get_init_inputs"])
    model = _without_memory(lambda: names["Model"](*given))
    inputs = _without_memory(names["get_inputs"])
    with torch.no_grad(), EagerCost() as cost, OneAttention(cost):
        result = model(*inputs)
    ends = _n_bytes(inputs) + _n_bytes(result)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    return {
        "inputs": encode(inputs, [], content=False),
        "given": encode(given, [], content=False),
        "eager": cost.operations,
        "least_bytes": ends + weights,
    }
