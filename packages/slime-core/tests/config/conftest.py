"""Fixtures of settings' tests: a recipe in a file, and a function that reads it with flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_core.config.load import load_settings

from .recipes import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def load(registry_of, recipe):
    return lambda *flags: load_settings([recipe], flags, registry=registry_of())
