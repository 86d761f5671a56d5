"""Data files for tests of sources."""

import json


def write_rows(path, rows):
    """Write a JSON Lines file, and return its path as settings name it."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)
