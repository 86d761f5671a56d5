"""Chains of elementwise steps, in PyTorch and as the expression of a Triton kernel: problems of which no two compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

#: Name of a step -> (PyTorch, the same in a kernel), of `{}`. Triton has no square, tanh, silu and softplus of its own.
STEPS: Mapping[str, tuple[str, str]] = {
    "relu": ("torch.relu({})", "tl.maximum({}, 0.0)"),
    "absolute": ("torch.abs({})", "tl.abs({})"),
    "sigmoid": ("torch.sigmoid({})", "tl.sigmoid({})"),
    "exponential": ("torch.exp({})", "tl.exp({})"),
    "sine": ("torch.sin({})", "tl.sin({})"),
    "cosine": ("torch.cos({})", "tl.cos({})"),
    "clamp": ("torch.clamp({}, -1.0, 1.0)", "tl.clamp({}, -1.0, 1.0)"),
    "double": ("(2.0 * {})", "(2.0 * {})"),
    "add_one": ("({} + 1.0)", "({} + 1.0)"),
    "square": ("torch.square({})", "({0} * {0})"),
    "tanh": ("torch.tanh({})", "(2.0 * tl.sigmoid(2.0 * {}) - 1.0)"),
    "silu": ("torch.nn.functional.silu({})", "({0} * tl.sigmoid({0}))"),
    "softplus": ("torch.nn.functional.softplus({})", "tl.log(1.0 + tl.exp({}))"),
}


def _pairs() -> Iterator[tuple[str, str, str]]:
    for inner, outer in permutations(STEPS, 2):
        torch, triton = (
            _without_parentheses(STEPS[outer][kind]).format(STEPS[inner][kind].format("x")) for kind in (0, 1)
        )
        yield f"{outer}_of_{inner}", torch, triton


def _without_parentheses(step: str) -> str:
    return step[1:-1] if step.startswith("(") else step


#: Name of a chain -> (PyTorch, the same in a kernel), of `x`.
CHAINS: Mapping[str, tuple[str, str]] = {name: (torch, triton) for name, torch, triton in _pairs()}
