"""`Record`: one row of data, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError


@dataclass(frozen=True)
class Record:
    """One row."""

    where: str
    """File and line (JSONL) or row (Parquet), both from 1: `train.jsonl:17`."""
    values: dict[str, Any]
    """Column -> value."""
    folder: Path = Path()
    """The file's: paths in it begin there and stay there, unless the settings name another one."""

    def value(self, key: str, *, setting: str) -> Any:
        """Return the value of column `key`, which `setting` asks for; of `column.name`, what a column of tables has under a name.

        Raises:
            DataError: there is no such column; names the row and the columns that it has.
        """
        found: Any = self.values
        for name in [key] if key in self.values else key.split("."):
            if not isinstance(found, dict) or name not in found:
                raise DataError(
                    f"{self.where}: found the columns {sorted(self.values)}; wanted {key!r} ({setting}); "
                    f"set {setting} to one of them"
                )
            found = found[name]
        return found
