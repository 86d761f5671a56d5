"""`plain`: a candidate in the form of PyTorch's own compiler (Inductor) as one that needs nothing of it.

KernelLLM and other models have learned from what Inductor writes: kernels of Triton, between helpers that live in private parts of
PyTorch. The helpers that allocate, describe or launch get definitions of their own here; those that compute stay, and are refused.
Source: the imports at the head of a module that Inductor writes (torch 2.5 to 2.11).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slime_kernels.gates.findings import path_of

_GUARDS = "torch._C._dynamo.guards"
_HELPERS = "torch._inductor.runtime.triton_helpers"
#: Path of a function -> its definition, under the name `found`.
_FUNCTIONS = {
    "torch._inductor.runtime.triton_heuristics.grid": """
def found(*sizes):
    def blocks(meta):
        names = ["XBLOCK", "YBLOCK", "ZBLOCK"][:len(sizes)]
        return tuple(triton.cdiv(size, meta.get(name, 1)) for name, size in zip(names, sizes[::-1]))
    return blocks
""",
    "torch._C._cuda_getCurrentRawStream": "def found(device): return 0",
    f"{_GUARDS}.assert_size_stride": """
def found(tensor, size, stride, *rest):
    assert tuple(tensor.shape) == tuple(size) and tuple(tensor.stride()) == tuple(stride), "another size or stride"
""",
    f"{_GUARDS}._empty_strided_cuda": "def found(size, stride, dtype): return torch.empty_strided(size, stride, dtype=dtype, device='cuda')",
    f"{_GUARDS}._reinterpret_tensor": "def found(tensor, size, stride, offset=0): return tensor.as_strided(size, stride, offset)",
}
_FUNCTIONS["torch.ops.inductor._reinterpret_tensor"] = _FUNCTIONS[f"{_GUARDS}._reinterpret_tensor"]
#: Names of the module of helpers -> functions of kernels, under the name `found`.
_OF_KERNELS = {
    "maximum": "def found(a, b): return tl.maximum(a, b, tl.PropagateNan.ALL)",
    "minimum": "def found(a, b): return tl.minimum(a, b, tl.PropagateNan.ALL)",
    "promote_to_tensor": "def found(x): return x + tl.zeros((1,), tl.int1)",
    "max2": "def found(a, dim: tl.constexpr): return tl.max(a, dim)",
    "min2": "def found(a, dim: tl.constexpr): return tl.min(a, dim)",
    "any": "def found(a, dim: tl.constexpr): return tl.max(a.to(tl.int32), dim) != 0",
}
#: Names of that module that are modules of Triton.
_MODULES = {
    "libdevice": "from triton.language.extra import libdevice as found",
    "math": "from triton.language import math as found",
}


def plain(tree: ast.Module) -> ast.Module:
    """Put definitions in the place of what is imported from Inductor, or named by a path of PyTorch's private parts."""
    if not any("._" in (path_of(node) or "") or _is_private_import(node) for node in ast.walk(tree)):
        return tree
    visitor = _Plain()
    body = [made for node in tree.body for made in visitor.statements(node)]
    kernels = [_named(f"@triton.jit\n{_OF_KERNELS[name]}", _name_of(name)) for name in sorted(visitor.used)]
    after = [i for i, node in enumerate(body) if isinstance(node, ast.Import | ast.ImportFrom)]
    first = after[-1] + 1 if after else 0
    tree.body = [*body[:first], *kernels, *body[first:]]
    return ast.fix_missing_locations(tree)


def _is_private_import(node: ast.AST) -> bool:
    names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
    return any("._" in name for name in [*names, str(getattr(node, "module", ""))])


class _Plain(ast.NodeTransformer):
    def __init__(self) -> None:
        self._helpers = set[str]()
        """What the module of helpers is imported as."""
        self.used = set[str]()
        """Names of functions of kernels that are asked for."""

    def statements(self, node: ast.stmt) -> Iterator[ast.stmt]:
        """Yield what stands in the place of a statement of the module."""
        if isinstance(node, ast.ImportFrom):
            yield from (made for alias in node.names for made in self._imported(node, alias))
        elif (
            isinstance(node, ast.Assign)
            and path_of(node.value) in _FUNCTIONS
            and isinstance(node.targets[0], ast.Name)
        ):
            yield _named(_FUNCTIONS[str(path_of(node.value))], node.targets[0].id)
        else:
            yield self.visit(node)

    def _imported(self, node: ast.ImportFrom, alias: ast.alias) -> Iterator[ast.stmt]:
        path, name = f"{node.module}.{alias.name}", alias.asname or alias.name
        if path in _FUNCTIONS:
            yield _named(_FUNCTIONS[path], name)
        elif node.module == _HELPERS and alias.name in _MODULES:
            yield _named(_MODULES[alias.name], name)
        elif path == _HELPERS:
            self._helpers.add(name)
        else:
            yield ast.ImportFrom(module=node.module, names=[alias], level=node.level, lineno=node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if path_of(node.value) in self._helpers and node.attr in _OF_KERNELS:
            self.used.add(node.attr)
            return ast.copy_location(ast.Name(_name_of(node.attr), ast.Load()), node)
        self.generic_visit(node)
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and path_of(call.func) == "torch.cuda._DeviceGuard":
                item.context_expr = ast.parse("torch.no_grad()", mode="eval").body
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Call) and path_of(node.value.func) == "torch.cuda.set_device":
            return ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        return node


def _name_of(helper: str) -> str:
    return f"inductor_{helper}"


def _named(source: str, name: str) -> ast.stmt:
    """Return the one statement of a source, in which `found` has another name."""
    (statement,) = ast.parse(source).body
    if isinstance(statement, ast.FunctionDef):
        statement.name = name
    elif isinstance(statement, ast.ImportFrom):
        statement.names[0].asname = name
    return statement
