"""Models that a run serves beside the policy: rewards find them by name.

`served:NAME` stands for `http://HOST:PORT` of the model NAME of the run, wherever a reward takes an address. Whoever serves
it writes its addresses into the run's folder, and keeps them true while servers come and go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.parsing import read_file
from slime_core.rundir import write_atomic

#: How the name of a model may look.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_URL = re.compile(rf"served:({NAME})(/.*)?")


def wanted_models(settings: Settings) -> list[tuple[str, str]]:
    """Return (setting, name) for every model that the settings ask for by `served:NAME`."""
    return [
        (where, found[1])
        for table, section in settings.sections.items()
        for where, text in _texts(table, dict(section))
        if (found := _URL.fullmatch(text)) is not None
    ]


def write_addresses(run_dir: Path, name: str, addresses: Sequence[str]) -> None:
    """Say where a model is served: `http://HOST:PORT` each, none while nobody does."""
    path = _file(run_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(list(addresses)) + "\n")


def forget_addresses(run_dir: Path, name: str) -> None:
    """Say that a model is not served any more."""
    _file(run_dir, name).unlink(missing_ok=True)


def resolve_url(url: str, run_dir: str | Path | None) -> list[str]:
    """Return the addresses that `served:NAME/path` stands for now, and any other address as it is.

    Args:
        url: of either kind.
        run_dir: folder of the run that serves the model; None outside of a run.

    Raises:
        ConfigError: the run serves no such model.
    """
    found = _URL.fullmatch(url)
    if found is None:
        return [url]
    if run_dir is None:
        raise ConfigError([Problem(url, "no run", "a run that serves it", "give the address of a server")])
    path = _file(Path(run_dir), found[1])
    try:
        addresses = json.loads(read_file(path))
    except FileNotFoundError:
        raise ConfigError(
            [Problem(url, f"no {path}", "a model that this run serves", "--sglang-config says which")]
        ) from None
    except (ValueError, RecursionError):
        addresses = None
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise ConfigError(
            [Problem(str(path), "no list of addresses", "what the run writes", "restart the run")]
        )
    return [address + (found[2] or "") for address in addresses]


def _file(run_dir: Path, name: str) -> Path:
    return run_dir / "served" / f"{name}.json"


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(f"{where}.{key}", entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(where, entry)
