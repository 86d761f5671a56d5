"""`EvalRequest`: what a service is asked, in the fork's form."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict
from slime_core.config.base import Count, Index, Seed

from slime_kernels.problems.constants import check_shapes
from slime_kernels.problems.problem import KernelProblem, check_source


class EvalRequest(BaseModel):
    """One candidate for one problem."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    original_model_src: str
    """Source of the problem: `class Model`, `get_inputs`, `get_init_inputs`."""
    custom_model_src: str
    """Source of the candidate: `class ModelNew`."""
    num_correct_trials: Annotated[int, Ge(1), Le(1000)] = 5
    num_perf_trials: Index = 100
    """Nothing is timed where it is 0; the cost model needs no more than one."""
    measure_performance: bool = True
    backend: str = "triton"
    verbose: bool = False
    """Tell each kernel's registers and what its time consists of."""
    seed: Seed = 42
    level: Annotated[int, Ge(1), Le(4)] = 1
    problem_id: Index = 0
    problem_name: str = "problem"
    shapes: list[dict[str, Count]] = []
    """Values of the problem's module-level integers with which it is small."""
    dtypes: list[str] = ["float32"]

    def problem(self) -> KernelProblem:
        """Return the problem.

        Raises:
            DataError: its source is none, or a shape names what it does not assign.
        """
        check_source(self.original_model_src, "original_model_src")
        check_shapes(self.shapes, self.original_model_src, "shapes")
        return KernelProblem(
            level=self.level,
            problem_id=self.problem_id,
            name=self.problem_name,
            code=self.original_model_src,
            shapes=tuple(self.shapes),
            dtypes=tuple(self.dtypes),
        )


def request_of(problem: KernelProblem, source: str, **options: Any) -> dict[str, Any]:
    """Return what to ask of a candidate, as JSON values."""
    return {
        "original_model_src": problem.code,
        "custom_model_src": source,
        "level": problem.level,
        "problem_id": problem.problem_id,
        "problem_name": problem.name,
        "shapes": [dict(shape) for shape in problem.shapes],
        "dtypes": list(problem.dtypes),
        **options,
    }
