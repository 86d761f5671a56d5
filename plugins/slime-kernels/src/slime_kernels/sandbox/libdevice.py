"""Functions of libdevice, NVIDIA's library of functions on numbers, for Triton's interpreter, which has none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as of_cuda
from triton.runtime import interpreter

_SAME = """acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc exp exp2 expm1 floor fmod hypot log log10 log1p log2
nextafter pow rsqrt sin sinh sqrt tan tanh trunc"""
#: Name in libdevice, without the `f` of single precision -> what it computes, of float64 tensors.
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME.split()},
    "abs": torch.abs,
    "llabs": torch.abs,
    "fma": lambda a, b, c: a * b + c,
    "cbrt": lambda x: x.abs().pow(1 / 3).copysign(x),
    "cospi": lambda x: torch.cos(torch.pi * x),
    "sinpi": lambda x: torch.sin(torch.pi * x),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.special.erfinv,
    "exp10": lambda x: torch.pow(10.0, x),
    "fabs": torch.abs,
    "fdim": lambda a, b: (a - b).clamp_min(0),
    "fdivide": torch.div,
    "fast_fdivide": torch.div,
    "fast_pow": torch.pow,
    "finite": torch.isfinite,
    "isfinited": torch.isfinite,
    "isinf": torch.isinf,
    "isinfd": torch.isinf,
    "isnan": torch.isnan,
    "isnand": torch.isnan,
    "signbit": torch.signbit,
    "signbitd": torch.signbit,
    "lgamma": torch.lgamma,
    "nearbyint": torch.round,
    "rint": torch.round,
    "round": lambda x: (x.abs() + 0.5).floor().copysign(x),  # halves away from 0
    "llrint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "powi": torch.pow,
    "rcbrt": lambda x: x.abs().pow(-1 / 3).copysign(x),
    "rhypot": lambda a, b: 1 / torch.hypot(a, b),
    "saturate": lambda x: x.nan_to_num(0.0).clamp(0, 1),
    "tgamma": lambda x: torch.lgamma(x).exp() * torch.where((x < 0) & (x.floor() % 2 != 0), -1.0, 1.0),
    "remainder": lambda a, b: a - b * torch.round(a / b),
}
_FUNCTIONS |= {
    f"fast_{name}": _FUNCTIONS[name] for name in ("cos", "exp10", "exp", "log10", "log2", "log", "sin", "tan")
}
_FUNCTIONS |= {f"{letter}{name}_rn": function for letter in "fd" for name, function in (
    ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div), ("sqrt", torch.sqrt),
    ("rcp", torch.reciprocal), ("rsqrt", torch.rsqrt),
)}  # fmt: skip


def install() -> None:
    """Let kernels that are interpreted call libdevice, by both of its names."""
    interpreter.interpreter_builder.create_extern_elementwise = _elementwise
    for name, function in vars(of_cuda).items():
        if callable(function) and hasattr(libdevice, name):
            bound = _bound(function)
            setattr(libdevice, name, bound)
            setattr(of_cuda, name, bound)


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args, _semantic=interpreter.interpreter_semantic)

    return call


def _elementwise(
    library: str, path: str, symbol: str, args: Sequence[Any], result: Any, is_pure: bool
) -> interpreter.TensorHandle:
    """Compute a function of libdevice, as the interpreter's builder does its own operations.

    Raises:
        NotImplementedError: it is none of those here.
    """
    name = symbol.removeprefix("__nv_")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"libdevice's {symbol} is not known without a GPU")
    found = function(*(torch.from_numpy(one.data).to(torch.float64) for one in args)).numpy()
    return interpreter.TensorHandle(found.astype(interpreter._get_np_dtype(result.scalar)), result.scalar)
