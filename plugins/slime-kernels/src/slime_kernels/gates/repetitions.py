"""`without_repetitions`: a candidate without what it repeats of its problem's module, and without a test of its own."""

from __future__ import annotations

import ast

#: What a problem's module has, and a candidate may repeat: nobody calls it there.
_OF_PROBLEM = ("Model", "get_inputs", "get_init_inputs")
_MAIN = ast.dump(ast.parse("__name__ == '__main__'", mode="eval").body)


def without_repetitions(tree: ast.Module) -> ast.Module:
    """Drop the reference and the functions that make inputs, where nothing else names them, and `if __name__ == "__main__"`."""
    rest = [node for node in tree.body if not _is_test(node)]
    while kept := [node for node in rest if not _is_repeated(node, rest)]:
        if len(kept) == len(rest):
            break
        rest = kept
    tree.body = rest
    return tree


def _is_repeated(node: ast.stmt, body: list[ast.stmt]) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.decorator_list:
        return False
    others = (inner for other in body if other is not node for inner in ast.walk(other))
    return node.name in _OF_PROBLEM and not any(
        isinstance(one, ast.Name) and one.id == node.name for one in others
    )


def _is_test(node: ast.stmt) -> bool:
    """Return whether this runs in a program alone, which a candidate never is."""
    return isinstance(node, ast.If) and not node.orelse and ast.dump(node.test) == _MAIN
