"""Reading the corpus: written problems with right and wrong kernels, cheats, and honest kernels that look like them."""

from __future__ import annotations

import tomllib
from pathlib import Path
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


def candidates(name: str) -> dict[str, tuple[KernelProblem, str]]:
    """Return name -> (problem, source) of the cheats, or of the honest."""
    problems = {key: problem for key, (problem, _, _) in written().items()}
    return {
        one["name"]: (problems[one["problem"]], KERNEL_IMPORTS + RELU + one["kernel"]) for one in read(name)
    }
