"""What a name means where it stands: what a function binds, and whether `self` is an object of the candidate's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from string import Formatter

from slime_kernels.gates.names import Names

_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
#: Builtins by which methods and classes are known; a candidate that gives one another meaning is refused.
RELIED_ON = frozenset({"super", "isinstance", "property", "staticmethod", "classmethod"})
#: Decorators, besides `property` and `NAME.setter`, under which a method still gets its own object.
_KEEP_OWNER = frozenset({"torch.no_grad", "torch.inference_mode", "functools.cache", "functools.lru_cache"})
_OF_FUNCTION = frozenset({"forward", "backward", "setup_context"})


def bound_in(scope: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names that a function or the body of a class assigns to in its own scope, and not in one within: there they are its own."""
    return {
        node.id
        for node in _within(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }


def imported_in(scope: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names that are imports in a scope, whatever else is assigned to them."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in _within(scope)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def _within(scope: ast.FunctionDef | ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, and of none within."""
    left = list[ast.AST](scope.body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _SCOPES):
            left += ast.iter_child_nodes(node)


def parameters(function: ast.FunctionDef | ast.Lambda) -> set[str]:
    """Return the names of a function's parameters."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def owner_of(method: ast.FunctionDef, around: ast.ClassDef | None, names: Names) -> str | None:
    """Return the parameter that is always an object of the candidate's class, or what autograd made for it: `self`, `cls` or `ctx`.

    Args:
        method: a function.
        around: the class in whose body it stands; None elsewhere, where a parameter may be anything.
        names: of the module.
    """
    first = next(iter([*method.args.posonlyargs, *method.args.args]), None)
    if around is None or first is None or any(_rebinds(node, first.arg) for node in ast.walk(method)):
        return None
    kinds = [ast.unparse(one) for one in method.decorator_list]
    if first.arg == "self":
        return "self" if all(_keeps_owner(one, names) for one in method.decorator_list) else None
    if first.arg == "cls":
        return "cls" if kinds == ["classmethod"] else None
    is_function = any(names.path(base) == "torch.autograd.Function" for base in around.bases)
    known = first.arg == "ctx" and is_function and method.name in _OF_FUNCTION
    return "ctx" if known and kinds == ["staticmethod"] else None


def methods_with_owner(tree: ast.Module, names: Names) -> set[str]:
    """Return the names of methods that write to their own object, and so must get no other."""
    return {
        method.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and owner_of(method, node, names) in ("self", "ctx")
    }


def plain_uses(tree: ast.Module, names: Names) -> set[int]:
    """Return the identities of nodes that name a class and hand it to nobody: what is called, derived from, asked for or annotated."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.add(id(node.func))
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            asked = {"isinstance": node.args[1:], "super": node.args}.get(called, [])
            found |= {id(inner) for one in asked for inner in ast.walk(one)}
        elif isinstance(node, ast.Attribute):
            found.add(id(node.value))  # what of a class may be named is looked at there
        elif isinstance(node, ast.ClassDef):
            found |= {id(base) for base in node.bases}
        elif isinstance(node, ast.Subscript) and str(names.path(node.value)).startswith("typing."):
            found |= {id(inner) for inner in ast.walk(node.slice)}
        found |= {id(inner) for one in _annotations(node) for inner in ast.walk(one)}
    return found


def is_plain_format(node: ast.Attribute) -> bool:
    """Return whether this is `"...".format` of a text whose fields are names or numbers alone, and read no attribute of what is put in."""
    text = node.value.value if isinstance(node.value, ast.Constant) else None
    if node.attr != "format" or not isinstance(text, str):
        return False
    try:
        fields = [(name or "", spec or "") for _, name, spec, _ in Formatter().parse(text)]
    except ValueError:
        return False
    return all((not name or name.isalnum()) and "{" not in spec for name, spec in fields)


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns


def _keeps_owner(decorator: ast.expr, names: Names) -> bool:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    is_setter = isinstance(inner, ast.Attribute) and inner.attr == "setter"
    return is_setter or ast.unparse(decorator) == "property" or names.path(inner) in _KEEP_OWNER


def _rebinds(node: ast.AST, name: str) -> bool:
    """Return whether a node may give a name another value, but for a parameter of a function within, which is looked at there."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0]) == name
    kinds = (
        ast.ExceptHandler | ast.FunctionDef | ast.ClassDef | ast.TypeVar | ast.ParamSpec | ast.TypeVarTuple
    )
    return isinstance(node, kinds) and node.name == name
