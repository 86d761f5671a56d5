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
