"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import importlib_metadata
import pytest
from slime_core.plugins.registry import Registry

Install = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of installed distributions, importable."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def memory_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainers and engines of `memory_parts` importable."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def install(site: Path) -> Install:
    """Lay out an installed distribution: metadata, entry points, modules."""

    def lay_out(name: str, entry_points: str, *, version: str = "1.0", **modules: str) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)

    return lay_out


@pytest.fixture
def registry_of(site: Path) -> Callable[..., Registry]:
    """Build a registry that sees only what `install` laid out."""

    def build(**kwargs: object) -> Registry:
        points = [p for d in importlib_metadata.distributions(path=[str(site)]) for p in d.entry_points]
        points += importlib_metadata.entry_points(group="slime.hookspecs")
        return Registry(points, **kwargs)  # type: ignore[arg-type]  # `allow` is the only keyword

    return build
