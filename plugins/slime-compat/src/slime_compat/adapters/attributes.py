"""Which attributes of `args` a function reads, found in its source before it is called."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slime_core.config.settings import Settings

#: Functions by which a loss takes log-probs of its logits.
_LOG_PROBS = ("get_log_probs_and_entropy", "policy_loss_function", "sft_loss_function")
#: Functions that ask for an attribute by its name.
_ASKING = ("getattr", "hasattr", "setattr")
#: Functions that find `args` without its name.
_LOOKING_AROUND = frozenset({"eval", "exec", "locals", "vars"})
#: What samples have there, and not here.
_OF_SAMPLES = frozenset({"Status", "append_response_tokens", "get_reward_value", "loss_masks"})


def unknown_attributes(function: Callable[..., Any], known: frozenset[str]) -> dict[str, str]:
    """Return attributes of `args` that a function reads and that are not known: name -> file and line, the first one.

    Looked at are the function and those of its module that it passes `args` to. `getattr(args, name, default)` and `hasattr` ask
    first, and are no trouble; nor is what the module itself sets, or asks for by `hasattr`. A function whose source is not there says
    nothing, nor does one of a module that sets attributes by names that it computes.
    """
    found: dict[str, str] = {}
    module = inspect.getmodule(function)
    given = _given_elsewhere(module)
    if given is None:
        return {}
    seen: set[str] = set()
    waiting: list[Any] = [function]
    while waiting:
        one = inspect.unwrap(waiting.pop())
        name = getattr(one, "__qualname__", "")
        if name in seen or inspect.getmodule(one) is not module:
            continue
        seen.add(name)
        for node, where in _nodes(one):
            if _is_read(node) and node.attr not in known | given:  # type: ignore[attr-defined]  # an ast.Attribute
                found.setdefault(node.attr, where)  # type: ignore[attr-defined]  # as above
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _passes_args(node):
                called = getattr(module, node.func.id, None)
                if inspect.isfunction(called):
                    waiting.append(called)
    return found


def is_foreign(function: Callable[..., Any], package: str) -> bool:
    """Return whether a function that either system could call was written for the other one.

    Args:
        function: with a parameter `args`.
        package: that files written for that system import.
    """
    tree = _module_tree(function)
    if tree is None:
        return False
    if any(_imports(node, package) for node in ast.walk(tree)):
        return True
    used = {node.attr for node, _ in _nodes(function) if isinstance(node, ast.Attribute)}
    return bool(used & _OF_SAMPLES) or bool(unknown_attributes(function, frozenset(dir(Settings))))


def settings_read(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the words of a function's file, among which are all settings that it may read; None where others might read `args`, too.

    They cannot where the file reads attributes of `args` by their names, and hands it only to functions at its top, which call it so,
    too. None is also of a function whose source is not there, which something decorates, or which is not at the top of its file.
    """
    tree = _module_tree(function)
    if tree is None:
        return None
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    others = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    others |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    own = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.decorator_list
        and node.name not in others
    }
    if getattr(function, "__name__", None) not in own or "args" not in inspect.signature(function).parameters:
        return None
    staying = {id(one) for node in nodes for one in _staying(node, own)}
    leaves = any(
        _is_args(name) and isinstance(name.ctx, ast.Load) and id(name) not in staying for name in names
    )
    if leaves or any(name.id in _LOOKING_AROUND for name in names):
        return None
    return frozenset(re.findall(r"\w+", inspect.getsource(inspect.getmodule(function))))  # type: ignore[arg-type]  # it has one


def asks_for(function: Callable[..., Any], flag: str) -> bool:
    """Return whether a function's file passes `flag=` anything but False to a call; True where its source is not there."""
    tree = _module_tree(function)
    return tree is None or any(
        isinstance(node, ast.keyword)
        and node.arg == flag
        and not (isinstance(node.value, ast.Constant) and not node.value.value)
        for node in ast.walk(tree)
    )


def computes_with_logits(function: Callable[..., Any]) -> bool:
    """Return whether a loss does more with its logits, its third parameter, than to take log-probs of them by the functions for it.

    True where its source is not there. Functions of its module that it hands them to are looked at, too.
    """
    return _computes(inspect.unwrap(function), list(inspect.signature(function).parameters)[2], set())


def _computes(function: Any, name: str, seen: set[tuple[str, str]]) -> bool:
    """Return whether a function does more with a parameter of this name than to hand it on."""
    key = (getattr(function, "__qualname__", ""), name)
    if key in seen:
        return False
    seen.add(key)
    nodes = [node for node, _ in _nodes(function)]
    handed = {
        id(given)
        for call in nodes
        if isinstance(call, ast.Call)
        for place, given in [*enumerate(call.args), *((each.arg, each.value) for each in call.keywords)]
        if isinstance(given, ast.Name) and given.id == name and _only_hands_on(function, call, place, seen)
    }
    uses = (node for node in nodes if isinstance(node, ast.Name) and node.id == name)
    return not nodes or any(isinstance(use.ctx, ast.Load) and id(use) not in handed for use in uses)


def _only_hands_on(
    function: Any, call: ast.Call, place: int | str | None, seen: set[tuple[str, str]]
) -> bool:
    """Return whether an argument is given to a function that takes log-probs of it, or that hands it on to one."""
    called = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
    if called in _LOG_PROBS:
        return True
    module = inspect.getmodule(function)
    helper = getattr(module, str(called), None)
    if not inspect.isfunction(helper) or inspect.getmodule(helper) is not module:
        return False
    names = list(inspect.signature(helper).parameters)
    name = names[place] if isinstance(place, int) and place < len(names) else place
    return isinstance(name, str) and name in names and not _computes(helper, name, seen)


def calls(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function's file calls another of this name, also as an attribute; False where its source is not there."""
    tree = _module_tree(function)
    return tree is not None and any(
        isinstance(node, ast.Call)
        and name in (getattr(node.func, "id", None), getattr(node.func, "attr", None))
        for node in ast.walk(tree)
    )


def _staying(node: ast.AST, own: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> Iterator[ast.AST]:
    """Yield the uses of `args` in a node by which nothing outside of its file can read a setting.

    Args:
        node: of the file.
        own: functions of the file, by name.
    """
    if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
        yield node.value
    if not isinstance(node, ast.Call):
        return
    if getattr(node.func, "attr", None) == "get_reward_value":  # of samples: it reads the reward's key
        yield from node.args
    called = getattr(node.func, "id", "")
    if called in _ASKING and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        yield node.args[0]
    if called in own:
        parameters = own[called].args
        places = [one.arg for one in [*parameters.posonlyargs, *parameters.args]]
        yield from (given for place, given in zip(places, node.args, strict=False) if place == "args")
        yield from (each.value for each in node.keywords if each.arg == "args")


def _module_tree(function: Callable[..., Any]) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(inspect.getmodule(function)))  # type: ignore[arg-type]  # no module, no source
    except (OSError, TypeError, SyntaxError):
        return None


def _imports(node: ast.AST, package: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == package and not node.level
    return isinstance(node, ast.Import) and any(one.name.partition(".")[0] == package for one in node.names)


def _nodes(function: Any) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes of a function's source, and where each stands."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return
    file = inspect.getsourcefile(function)
    for node in ast.walk(tree):
        yield node, f"{file}:{first + getattr(node, 'lineno', 1) - 1}"


def _given_elsewhere(module: Any) -> frozenset[str] | None:
    """Return the attributes of `args` that a module sets, or looks for before it reads them; None where it may set any."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_args(node.value) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in ("hasattr", "setattr") and len(node.args) > 1 and _is_args(node.args[0])
            if asks and isinstance(node.args[1], ast.Constant):
                names.add(str(node.args[1].value))
            elif asks and node.func.id == "setattr":
                return None
    return frozenset(names)


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_args(node.value) and isinstance(node.ctx, ast.Load)


def _passes_args(node: ast.Call) -> bool:
    return any(_is_args(one) for one in [*node.args, *(keyword.value for keyword in node.keywords)])


def _is_args(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "args"
