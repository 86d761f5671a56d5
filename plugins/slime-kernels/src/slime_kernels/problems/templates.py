"""Sources of generated problems: a module a family, with places for an operation and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_kernels.problems.chains import CHAINS
from slime_kernels.problems.problem import KernelProblem

_MODULE = """\
import torch
import torch.nn as nn
{more}
{constants}

class Model(nn.Module):
    def __init__(self{parameters}):
        super().__init__()
{body}

    def forward(self, {arguments}):
        return {result}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return [{given}]
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Problems of one form."""

    level: int
    variants: Mapping[str, str]
    """Name of an operation -> the expression that `forward` returns."""
    arguments: str
    inputs: str
    sizes: tuple[str, ...]
    """Module-level integers of the source."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Name of an operation -> the expression of a kernel that computes one element; of all, or of none."""
    each_once: bool = False
    """No operation is drawn twice, with other sizes: what is held out is then an operation that none is trained on."""
    least: int = 64
    """Smallest size that is drawn."""
    most: int = 4096
    small: tuple[Mapping[str, int], ...] = ()
    """Sizes to try it with where there is no GPU."""
    parameters: str = ""
    given: str = ""
    body: str = "        pass"
    more: str = ""

    def source(self, variant: str, sizes: Mapping[str, int]) -> str:
        """Return the module of an operation and its sizes."""
        return _MODULE.format(
            more=self.more,
            constants="\n".join(f"{name} = {value}" for name, value in sizes.items()) + "\n",
            parameters=self.parameters,
            body=self.body,
            arguments=self.arguments,
            result=self.variants[variant],
            inputs=self.inputs,
            given=self.given,
        )


_ROWS = ("rows", "columns")
_SMALL_ROWS = ({"rows": 3, "columns": 40}, {"rows": 5, "columns": 33})
_UNARY = {
    "relu": "torch.relu(x)",
    "square": "x * x",
    "double": "x + x",
    "negate": "-x",
    "absolute": "torch.abs(x)",
    "sigmoid": "torch.sigmoid(x)",
    "exponential": "torch.exp(x)",
    "add_one": "x + 1.0",
    "halve": "x * 0.5",
    "leaky_relu": "torch.where(x > 0, x, 0.01 * x)",
    "silu": "x * torch.sigmoid(x)",
    "clamp": "torch.clamp(x, -1.0, 1.0)",
    "shifted_square": "(x + 1.0) * (x + 1.0)",
    "triple": "x * 3.0",
}
_UNARY_ANSWERS = {
    "relu": "tl.maximum(x, 0.0)",
    "square": "x * x",
    "double": "x + x",
    "negate": "-x",
    "absolute": "tl.abs(x)",
    "sigmoid": "tl.sigmoid(x)",
    "exponential": "tl.exp(x)",
    "add_one": "x + 1.0",
    "halve": "x * 0.5",
    "leaky_relu": "tl.where(x > 0, x, 0.01 * x)",
    "silu": "x * tl.sigmoid(x)",
    "clamp": "tl.clamp(x, -1.0, 1.0)",
    "shifted_square": "(x + 1.0) * (x + 1.0)",
    "triple": "x * 3.0",
}
_BINARY = {
    "add": "x + y",
    "subtract": "x - y",
    "multiply": "x * y",
    "maximum": "torch.maximum(x, y)",
    "minimum": "torch.minimum(x, y)",
    "average": "(x + y) * 0.5",
    "add_relu": "torch.relu(x + y)",
    "multiply_add": "x * y + x",
}
_BINARY_ANSWERS = _BINARY | {
    "maximum": "tl.maximum(x, y)",
    "minimum": "tl.minimum(x, y)",
    "add_relu": "tl.maximum(x + y, 0.0)",
}
_REDUCTIONS = {
    "sum": "torch.sum(x, dim=1)",
    "mean": "torch.mean(x, dim=1)",
    "max": "torch.amax(x, dim=1)",
    "min": "torch.amin(x, dim=1)",
    "sum_of_squares": "torch.sum(x * x, dim=1)",
}
_SOFTMAX = {
    "softmax": "torch.softmax(x, dim=1)",
    "log_softmax": "torch.log_softmax(x, dim=1)",
    "softmax_scaled": "torch.softmax(x * 0.5, dim=1)",
}
_NORMS = {
    "rms_norm": "x * torch.rsqrt(torch.mean(x * x, dim=1, keepdim=True) + 1e-5)",
    "layer_norm": "torch.nn.functional.layer_norm(x, (x.shape[1],))",
    "l2_norm": "x / torch.sqrt(torch.sum(x * x, dim=1, keepdim=True) + 1e-6)",
    "l1_norm": "x / (torch.sum(torch.abs(x), dim=1, keepdim=True) + 1e-6)",
}
_PRODUCTS = {
    "matmul": "x @ y",
    "matmul_relu": "torch.relu(x @ y)",
    "matmul_scaled": "(x @ y) * 0.125",
}

FAMILIES: Mapping[str, Family] = {
    "elementwise": Family(
        level=1,
        variants=_UNARY,
        answers=_UNARY_ANSWERS,
        arguments="x",
        inputs="torch.randn(rows, columns)",
        sizes=_ROWS,
        small=_SMALL_ROWS,
    ),
    "binary": Family(
        level=1,
        variants=_BINARY,
        answers=_BINARY_ANSWERS,
        arguments="x, y",
        inputs="torch.randn(rows, columns), torch.randn(rows, columns)",
        sizes=_ROWS,
        small=_SMALL_ROWS,
    ),
    "chain": Family(
        level=2,
        variants={name: torch for name, (torch, _) in CHAINS.items()},
        answers={name: triton for name, (_, triton) in CHAINS.items()},
        arguments="x",
        inputs="torch.randn(rows, columns)",
        sizes=_ROWS,
        small=_SMALL_ROWS,
        each_once=True,
    ),
    "reduction": Family(
        level=1,
        variants=_REDUCTIONS,
        arguments="x",
        inputs="torch.randn(rows, columns)",
        sizes=_ROWS,
        small=_SMALL_ROWS,
    ),
    "softmax": Family(
        level=1,
        variants=_SOFTMAX,
        arguments="x",
        inputs="torch.randn(rows, columns)",
        sizes=_ROWS,
        small=_SMALL_ROWS,
    ),
    "norm": Family(
        level=2,
        variants=_NORMS,
        arguments="x",
        inputs="torch.randn(rows, columns)",
        sizes=_ROWS,
        small=_SMALL_ROWS,
    ),
    "matmul": Family(
        level=2,
        variants=_PRODUCTS,
        arguments="x, y",
        inputs="torch.randn(m, k), torch.randn(k, n)",
        sizes=("m", "n", "k"),
        most=1024,
        small=({"m": 18, "n": 20, "k": 33}, {"m": 16, "n": 16, "k": 16}),
    ),
}


def family_of(problem: KernelProblem) -> tuple[Family, str]:
    """Return the family of a generated problem, and the name of its operation."""
    name, _, variant = problem.name.partition("_")
    return FAMILIES[name], variant
