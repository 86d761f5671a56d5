"""`portable`: a candidate for a GPU as a candidate for a CPU: devices, and questions about them."""

from __future__ import annotations

import ast

from slime_kernels.gates.findings import path_of

#: How kernels say that an argument is known when they are compiled, as text: the interpreter looks at what it means alone.
_CONSTEXPR = ("tl.constexpr", "triton.language.constexpr")
_PROPERTIES = {"multi_processor_count": 108, "warp_size": 32}


def portable(tree: ast.Module) -> str:
    """Return the source of a candidate in which tensors are on the CPU: `cuda` is `cpu`, and `.is_cuda` is true."""
    return ast.unparse(ast.fix_missing_locations(_Portable().visit(tree)))


class _Portable(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | None:
        return None if node.module == "__future__" else node  # which makes text of annotations

    def visit_arg(self, node: ast.arg) -> ast.arg:
        if isinstance(node.annotation, ast.Constant) and node.annotation.value in _CONSTEXPR:
            node.annotation = ast.parse(str(node.annotation.value), mode="eval").body
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_device = isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:"))
        return ast.Constant("cpu") if is_device else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        inner = node.value
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.Constant(True)
        asked = isinstance(inner, ast.Call) and path_of(inner.func) == "torch.cuda.get_device_properties"
        if asked and node.attr in _PROPERTIES:
            return ast.Constant(_PROPERTIES[node.attr])
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        path = path_of(node.func)
        if path == "torch.cuda.current_device":
            return ast.Constant("cpu")
        if path == "torch.cuda.is_available":
            return ast.Constant(True)
        if path == "torch.cuda.device_count":
            return ast.Constant(1)
        if path == "torch.cuda.device":
            return ast.parse("torch.no_grad()", mode="eval").body
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and path != "torch.cuda":
            self.generic_visit(node)
            return node.func.value
        self.generic_visit(node)
        return node
