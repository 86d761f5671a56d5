"""Addresses of models that a run serves besides the policy, which rewards find by name (`served:NAME`).

`served:NAME` stands for `http://HOST:PORT` of the model NAME of the run, wherever a reward takes an address. Whoever serves
it writes its addresses into the run's folder, and keeps them true while servers come and go. Beside them stands the key
that the servers ask for, so nobody but the run's user may read the file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.files.strict_read import read_file

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


def write_addresses(run_dir: Path, name: str, addresses: Sequence[str], *, key: str | None = None) -> None:
    """Write the addresses where a model is served (`http://HOST:PORT` each, empty while there is none) and their common API key."""
    path = _file(run_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"addresses": list(addresses), "key": key}, file)
    new.replace(path)


def forget_addresses(run_dir: Path, name: str) -> None:
    """Delete the addresses of a model that is no longer served."""
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
    return [address + (found[2] or "") for address in _read(url, found[1], run_dir)["addresses"]]


def key_of(url: str, run_dir: str | Path | None) -> str | None:
    """Return the key that the servers of `served:NAME/path` ask for now, to be sent as `Authorization: Bearer KEY`.

    None for any other address, and while the model is not served.

    Raises:
        ConfigError: the run serves no such model.
    """
    found = _URL.fullmatch(url)
    key: str | None = None if found is None else _read(url, found[1], run_dir)["key"]
    return key


def _read(url: str, name: str, run_dir: str | Path | None) -> dict[str, Any]:
    """Return what `write_addresses` wrote."""
    if run_dir is None:
        raise ConfigError([Problem(url, "no run", "a run that serves it", "give the address of a server")])
    path = _file(Path(run_dir), name)
    try:
        told = json.loads(read_file(path))
    except FileNotFoundError:
        raise ConfigError(
            [Problem(url, f"no {path}", "a model that this run serves", "--sglang-config says which")]
        ) from None
    except (ValueError, RecursionError):
        told = None
    if not _is_whole(told):
        raise ConfigError(
            [Problem(str(path), "no list of addresses", "what the run writes", "restart the run")]
        )
    whole: dict[str, Any] = told
    return whole


def _is_whole(told: Any) -> bool:
    """Whether a file holds addresses and, perhaps, a key."""
    if not isinstance(told, dict) or set(told) != {"addresses", "key"}:
        return False
    addresses, key = told["addresses"], told["key"]
    are_texts = isinstance(addresses, list) and all(isinstance(address, str) for address in addresses)
    return are_texts and (key is None or isinstance(key, str))


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
