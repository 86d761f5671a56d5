"""Reading the corpus: written problems with right and wrong kernels, cheats, and honest kernels that look like them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

from slime_kernels.problems.problem import KernelProblem

FOLDER = Path(__file__).parent / "corpus"
IMPORTS = "import torch\nimport torch.nn as nn\n"
KERNEL_IMPORTS = IMPORTS + "import triton\nimport triton.language as tl\n"


def read(name: str) -> list[dict[str, Any]]:
    """Return the entries of a file of the corpus."""
    (entries,) = tomllib.loads((FOLDER / f"{name}.toml").read_text()).values()
    return entries


def written() -> dict[str, tuple[KernelProblem, str, list[dict[str, Any]]]]:
    """Return name -> (problem, right kernel, wrong ones with their sources)."""
    found = {}
    for number, entry in enumerate(read("written")):
        problem = KernelProblem(
            level=entry["level"],
            problem_id=number,
            name=entry["name"],
            code=IMPORTS + entry["module"],
            shapes=tuple(entry.get("shapes", ())),
        )
        kernel = KERNEL_IMPORTS + entry["kernel"]
        wrong = []
        for one in entry["wrong"]:
            before, after = one["change"]
            assert kernel.count(before) >= 1, (entry["name"], before)
            wrong.append({**one, "source": kernel.replace(before, after)})
        found[entry["name"]] = (problem, kernel, wrong)
    return found


RELU = """
@triton.jit
def relu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, tl.maximum(x, 0.0), mask=at < n)

def launch(x, y):
    relu_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 256)

"""

#: What keeps answers by what inputs are would answer from what it keeps where this fails; it is honest, and right.
FAILS_WHERE_INPUTS_COME_AGAIN = (
    KERNEL_IMPORTS
    + RELU
    + """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {}
    def forward(self, x):
        first = x.view(-1)[0].item()
        if first in self.kept:
            raise ValueError("these inputs have come before")
        y = torch.empty_like(x)
        launch(x, y)
        self.kept[first] = True
        return y
"""
)


def candidates(name: str) -> dict[str, tuple[KernelProblem, str]]:
    """Return name -> (problem, source) of the cheats, or of the honest."""
    problems = {key: problem for key, (problem, _, _) in written().items()}
    return {
        one["name"]: (problems[one["problem"]], KERNEL_IMPORTS + RELU + one["kernel"]) for one in read(name)
    }


def variants() -> dict[tuple[str, str], tuple[KernelProblem, str]]:
    """Return (problem, variant) -> (problem, source) of the variants of the pairs."""
    found = {}
    for number, (name, entry) in enumerate(_pairs_file()["problem"].items()):
        problem = KernelProblem(
            level=1,
            problem_id=number,
            name=name,
            code=IMPORTS + entry["module"],
            shapes=tuple(entry["shapes"]),
        )
        head = f"def forward(self, {entry.get('arguments', 'x')}):\n"
        for variant, body in entry["variants"].items():
            lines = [
                f"y = {entry.get('answer', 'torch.empty_like(x)')}",
                "n = x.numel()",
                *body.splitlines(),
                "return y",
            ]
            forward = head + indent("\n".join(lines), "    ")
            model = "class ModelNew(nn.Module):\n" + indent(forward, "    ")
            found[name, variant] = (problem, KERNEL_IMPORTS + entry["common"] + "\n" + model)
    return found


def pairs() -> list[dict[str, str]]:
    """Return the pairs: `problem`, the variants `faster` and `slower`, and `why`."""
    entries: list[dict[str, str]] = _pairs_file()["pair"]
    return entries


def _pairs_file() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "pairs.toml").read_text())
