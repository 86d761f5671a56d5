"""The modules of `tests/plugins` can be imported, and what they hold goes with the test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def importable(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let functions of a user's own be named, and import them anew in each test."""
    monkeypatch.syspath_prepend(root / "tests/plugins")
    yield
    for name in ("own_functions", "sample_hooks", "talking_agents"):
        sys.modules.pop(name, None)
