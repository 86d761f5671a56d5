"""`Names`: what the names of a candidate's module mean: which are modules, and which functions are kernels."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from slime_kernels.gates.allowed import LANGUAGE, LANGUAGE_MODULES, LIBDEVICE, MODULES, TRITON
from slime_kernels.gates.findings import Finding, line_of, path_of

_ROOTS = ("torch", "triton")
_IMPORTABLE = (
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.autograd",
    "triton",
    "triton.language",
    *LIBDEVICE,
)
#: Decorators by which a function is a kernel, and those that may stand around it.
JIT = "triton.jit"


@dataclass
class Names:
    """The imports and the functions of a module."""

    modules: dict[str, str] = field(default_factory=dict)
    """Name -> the dotted path that it was imported as."""
    kernels: dict[str, ast.FunctionDef] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def path(self, node: ast.AST) -> str | None:
        """Return the dotted path of a chain of attributes that begins at an import: `torch.nn.functional.relu`."""
        path = path_of(node)
        if path is None:
            return None
        first, dot, rest = path.partition(".")
        return None if first not in self.modules else f"{self.modules[first]}{dot}{rest}"


def read_names(tree: ast.Module) -> Names:
    """Read the imports and the kernels of a module, wherever they stand; findings are imports of what is not allowed."""
    names = Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _import(names, node, alias.name, alias)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.level or alias.name == "*":
                    names.findings.append(
                        Finding("import", node.lineno, "imports by name, and absolute, only")
                    )
                else:
                    _import_from(names, node, str(node.module), alias)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            paths = [
                names.path(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list
            ]
            if JIT in paths:
                names.kernels[node.name] = node
    return names


def _bind(names: Names, node: ast.AST, name: str, path: str) -> None:
    """Note what a name is imported as: one thing in the whole module."""
    if names.modules.setdefault(name, path) != path:
        names.findings.append(Finding("import", line_of(node), f"imports two things as {name}"))


def _import(names: Names, node: ast.AST, module: str, alias: ast.alias) -> None:
    if module not in _IMPORTABLE and module not in MODULES:
        names.findings.append(Finding("import", line_of(node), f"imports {module}, which is not allowed"))
        return
    first = module.partition(".")[0]
    _bind(names, node, alias.asname or first, module if alias.asname else first)


def _import_from(names: Names, node: ast.AST, module: str, alias: ast.alias) -> None:
    known, path = MODULES.get(module), f"{module}.{alias.name}"
    allowed = module in MODULES and (known is None or alias.name in known) and not alias.name.startswith("_")
    if module.partition(".")[0] in _ROOTS:
        allowed = path in _IMPORTABLE or (module in _IMPORTABLE and not alias.name.startswith("_"))
        if module == "triton":
            allowed = alias.name in TRITON
        elif module == "triton.language":
            allowed = alias.name in LANGUAGE or path in (*LANGUAGE_MODULES, *LIBDEVICE)
    if not allowed:
        names.findings.append(Finding("import", line_of(node), f"imports {path}, which is not allowed"))
    _bind(names, node, alias.asname or alias.name, path)
