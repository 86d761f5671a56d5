"""`Draft`: values of settings before validation, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_core.config.parsing.schema import Schema
from slime_core.config.sections import RIVALS
from slime_core.errors import Problem


@dataclass
class Draft:
    """Values before validation: where each came from, and the problems found so far."""

    schema: Schema
    problems: list[Problem]
    values: dict[str, dict[str, Any]]
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    levels: dict[tuple[str, str], int] = field(default_factory=dict)
    """How late each value was given: recipes count one after the other, flags come last."""
    level: int = 0
    unset: set[tuple[str, str]] = field(default_factory=set)
    """Settings that something wrong was probably meant for."""

    def put(self, table: str, field: str, value: Any, *, origin: str) -> None:
        """Set a value in the place of an earlier one."""
        self.values[table][field] = value
        self.origins[table, field] = origin
        self.levels[table, field] = self.level

    def put_out(self) -> None:
        """Forget what rivals of later values say, where two settings choose one thing (`RIVALS`)."""
        for table, fields in RIVALS:
            given = {f: self.levels[table, f] for f in fields if self.values[table].get(f)}
            for key, level in given.items():
                if level < max(given.values()):
                    del self.values[table][key]
                    del self.origins[table, key]

    def put_foreign(self, table: str, name: str, value: Any, *, origin: str) -> None:
        """Set a flag of another program beside those that a table has already."""
        held = self.schema.foreign[table].field
        self.put(table, held, {**self.values[table].get(held, {}), name: value}, origin=origin)

    def branch(self) -> Draft:
        """Return a copy of this draft; the list of problems is shared."""
        values = {table: dict(fields) for table, fields in self.values.items()}
        return Draft(
            self.schema,
            self.problems,
            values,
            dict(self.origins),
            dict(self.levels),
            self.level,
            set(self.unset),
        )
