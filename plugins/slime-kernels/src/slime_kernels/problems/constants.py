"""The whole numbers that a problem's module assigns, by which it is made small. Imports neither torch nor triton."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

from slime_core.errors import DataError

_Put = Callable[[ast.expr], None]
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
#: Bits of the largest number that is computed here.
_MOST_BITS = 64


def whole_numbers(code: str) -> dict[str, int]:
    """Return name -> value of the whole numbers that a module assigns, by expressions of numbers alone.

    `NAME[0]` is the first of a tuple or list. What is computed from other names follows these.
    """
    found = ((name, _value(expression)) for name, expression, _ in _assigned(ast.parse(code)))
    return {name: value for name, value in found if value is not None}


def with_numbers(code: str, numbers: Mapping[str, int]) -> ast.Module:
    """Return a module that assigns other numbers; names that it does not assign change nothing."""
    tree = ast.parse(code)
    for name, _, put in list(_assigned(tree)):
        if name in numbers:
            put(ast.Constant(numbers[name]))
    return ast.fix_missing_locations(tree)


def check_shapes(shapes: Iterable[Mapping[str, int]], code: str, where: str) -> None:
    """Check that a module assigns all names of its shapes; raises DataError."""
    known = {name for name, _, _ in _assigned(ast.parse(code))}
    unknown = sorted({name for shape in shapes for name in shape} - known)
    if unknown:
        raise DataError(
            f"{where}: found {', '.join(unknown)} in 'shapes', which the module does not assign; "
            f"wanted names of {', '.join(sorted(known)) or 'numbers that it assigns outside of functions'}"
        )


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr, _Put]]:
    """Yield each name that a statement of a module assigns, its expression, and what puts another one in its place."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value, _putting(node))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _pairs(node.target, node.value, _putting(node))


def _pairs(target: ast.expr, value: ast.expr, put: _Put) -> Iterator[tuple[str, ast.expr, _Put]]:
    items = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    plain = bool(items) and not any(isinstance(one, ast.Starred) for one in items)
    if isinstance(target, ast.Name):
        yield target.id, value, put
        for number in range(len(items)) if plain else ():
            yield f"{target.id}[{number}]", items[number], _putting_at(items, number)
    elif isinstance(target, ast.Tuple | ast.List) and plain and len(target.elts) == len(items):
        for number, one in enumerate(target.elts):
            yield from _pairs(one, items[number], _putting_at(items, number))


def _putting(node: ast.Assign | ast.AnnAssign) -> _Put:
    def put(value: ast.expr) -> None:
        node.value = value

    return put


def _putting_at(items: list[ast.expr], number: int) -> _Put:
    def put(value: ast.expr) -> None:
        items[number] = value

    return put


def _value(node: ast.expr) -> int | None:
    """Return what an expression of whole numbers alone is; None for any other."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None or max(left.bit_length(), right.bit_length()) > _MOST_BITS:
        return None
    if isinstance(node.op, ast.Pow) and not 0 <= right * left.bit_length() <= _MOST_BITS:
        return None
    return (
        None if isinstance(node.op, ast.FloorDiv) and right == 0 else _OPERATIONS[type(node.op)](left, right)
    )
