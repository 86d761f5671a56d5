"""`KernelProblem`: a PyTorch module to be rewritten, in the format of KernelBench."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slime_core.data.rows.record import Record
from slime_core.errors import DataError

from slime_kernels.problems.constants import check_shapes

#: Key of `Sample.metadata` under which a problem travels to generator and reward.
PROBLEM_KEY = "kernel_problem"
#: Key of `Sample.metadata`: how the problem's prompt was made (`text`, `chat`, `template_kwargs`).
PROMPT_KEY = "kernel_prompt"
#: Where the response goes in a skeleton.
ANSWER = "<answer>"
LEVELS = range(1, 5)


@dataclass(frozen=True, kw_only=True)
class KernelProblem:
    """A module `Model` and what it is called with."""

    level: int
    """1 single operators, 2 short sequences of them, 3 whole networks, 4 published ones."""
    problem_id: int
    name: str
    code: str
    """Source with `class Model`, `get_inputs()` and `get_init_inputs()`."""
    shapes: tuple[Mapping[str, int], ...] = ()
    """Values of the source's module-level integers with which it is small enough to be tried without a GPU, one a shape;
    `NAME[0]` is the first number of a tuple. Empty: they are found."""
    dtypes: tuple[str, ...] = ("float32",)
    """Types of the floating-point inputs with which it is tried."""
    skeleton: str = ""
    """A module `ModelNew` with `<answer>` where the response goes; empty where the response is the module."""

    @property
    def title(self) -> str:
        """How messages name it: `level 1 problem 19 (19_ReLU)`."""
        return f"level {self.level} problem {self.problem_id} ({self.name})"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {
            "shapes": [dict(shape) for shape in self.shapes],
            "dtypes": list(self.dtypes),
        }


def problem_of(record: Record) -> KernelProblem:
    """Read a row of KernelBench (`level`, `problem_id`, `name`, `code`), or of the fork's data.

    The latter has the source in `label`, and `level`, `problem_id` and `problem_name` in `extra_info`. Either may have
    `shapes`, a list of {module-level integer: value}, `dtypes`, and `skeleton`.

    Raises:
        DataError: a field is missing or is not what it must be, or a shape names what the module does not assign; names the row
            and the field.
    """
    row = dict(record.values)
    extra = row.get("extra_info")
    if isinstance(extra, Mapping):
        row = {"code": row.get("label"), "name": extra.get("problem_name"), **extra, **row}
    kinds = {"level": int, "problem_id": int, "name": str, "code": str}
    for field, kind in kinds.items():
        if type(row.get(field)) is not kind:
            found = f"{type(row[field]).__name__} {str(row[field])[:40]!r}" if field in row else "nothing"
            raise DataError(
                f"{record.where}: found {found} in {field!r}; wanted {kind.__name__}, as KernelBench has it"
            )
    if row["level"] not in LEVELS:
        raise DataError(f"{record.where}: found the level {row['level']}; wanted 1 to 4")
    check_source(row["code"], record.where)
    shapes = _shapes(row.get("shapes"), record.where)
    check_shapes(shapes, row["code"], record.where)
    return KernelProblem(
        **{field: row[field] for field in kinds},
        shapes=shapes,
        dtypes=_dtypes(row.get("dtypes"), record.where),
        skeleton=_skeleton(row.get("skeleton"), record.where),
    )


def problem_from(metadata: Mapping[str, Any]) -> KernelProblem:
    """Return the problem that `to_dict` tells of.

    Raises:
        DataError: it is none.
    """
    return problem_of(Record("metadata", dict(metadata)))


def check_source(code: str, where: str) -> None:
    """Check that a problem's source has `class Model`, `get_inputs` and `get_init_inputs`; raises DataError."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: found code that is not Python ({error}); wanted a module") from error
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if name not in found]
    if missing:
        raise DataError(
            f"{where}: found code without {', '.join(missing)}; wanted class Model, get_inputs() and get_init_inputs()"
        )


def filled(skeleton: str, answer: str) -> str:
    """Return a skeleton with an answer in its place."""
    return skeleton.replace(ANSWER, answer)


def expression_of(code: str, where: str) -> str:
    """Return what `Model.forward` returns, as it is written.

    Raises:
        DataError: `forward` is not one `return`.
    """
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            forward = next((one for one in node.body if getattr(one, "name", "") == "forward"), None)
            match forward:
                case ast.FunctionDef(body=[ast.Return(value=ast.expr() as value)]):
                    return ast.get_source_segment(code, value) or ast.unparse(value)
    raise DataError(
        f"{where}: found a forward of several statements; wanted one return, for {{expression}} in the prompt"
    )


def _skeleton(value: Any, where: str) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, str) and value.count(ANSWER) == 1:
        return value
    raise DataError(
        f"{where}: found {str(value)[:60]!r} in 'skeleton'; wanted a module with {ANSWER} in one place"
    )


def _shapes(value: Any, where: str) -> tuple[Mapping[str, int], ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple) and all(
        isinstance(one, Mapping) and all(type(size) is int and size > 0 for size in one.values())
        for one in value
    ):
        return tuple(dict(one) for one in value)
    raise DataError(
        f"{where}: found {str(value)[:60]!r} in 'shapes'; wanted a list of {{name: whole number above 0}}"
    )


def _dtypes(value: Any, where: str) -> tuple[str, ...]:
    known = ("float32", "float16", "bfloat16")
    if value is None:
        return known[:1]
    if isinstance(value, list | tuple) and value and all(one in known for one in value):
        return tuple(value)
    raise DataError(f"{where}: found {str(value)[:60]!r} in 'dtypes'; wanted a list of {', '.join(known)}")
