"""`Made`: what is made of one of the reference system's scripts so far; rules add to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import Problem

from slime_compat.launch.script import Script


@dataclass
class Made:
    """What is made of a script so far."""

    script: Script
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    known: Callable[[str], bool] = lambda name: True
    """Whether slime, or a program that it drives, has a flag of this name."""

    def put(self, table: str, key: str, value: Any) -> None:
        """Give a setting a value, where no flag gives one."""
        self.defaults.setdefault(table, {})[key] = value

    def note(self, flag: str, text: str) -> None:
        """Say what became of a flag."""
        self.notes.append(f"--{flag.replace('_', '-')}: {text}")

    def refuse(self, flag: str, found: str, wanted: str, todo: str = "") -> None:
        """Refuse a flag."""
        self.problems.append(Problem(f"--{flag.replace('_', '-')}", found, wanted, todo))
