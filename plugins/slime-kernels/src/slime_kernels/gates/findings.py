"""`Finding`: what the static gate has against a candidate."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A reason to refuse a candidate."""

    rule: str
    """Which rule: `syntax`, `structure`, `import`, `name`, `forbidden`, `delegation`."""
    line: int
    text: str

    def __str__(self) -> str:
        """Write it for whoever is to do better."""
        return f"{self.rule}: line {self.line}: {self.text}" if self.line else f"{self.rule}: {self.text}"


def path_of(node: ast.AST) -> str | None:
    """Return `a.b.c` of a chain of attributes of a name; None for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def line_of(node: ast.AST) -> int:
    """Return the line where a node begins; 0 where it has none."""
    return int(getattr(node, "lineno", 0))
