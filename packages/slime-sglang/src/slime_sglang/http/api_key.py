"""The API key that the servers of a run ask for: any user of this host reaches their ports, and could send them weights."""

from __future__ import annotations

import secrets
from pathlib import Path

from slime_core.errors import ConfigError, Problem

#: Environment variable in which a server or router that the run starts finds its key.
KEY_VARIABLE = "SLIME_SGLANG_KEY"


class ApiKey(str):
    """An API key, which `repr` hides: SGLang writes all arguments of a server into its log."""

    def __repr__(self) -> str:
        """Return a placeholder, which anybody may read."""
        return "'***'"


def new_key() -> ApiKey:
    """Return a new random key."""
    return ApiKey(secrets.token_urlsafe(32))


def read_key(path: Path, *, where: str) -> ApiKey:
    """Return the key that a file holds: one line, of letters that fit into a header.

    Args:
        path: of the file.
        where: setting that names it, for the error.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError([Problem(where, f"{path} ({why})", "a file with a key")]) from error
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        found = "an empty file" if not text else "more than a key"
        raise ConfigError([Problem(where, f"{path}: {found}", "one line of ASCII letters without spaces")])
    return ApiKey(text)


def key_headers(key: str | None) -> dict[str, str]:
    """Return the HTTP headers that carry a key; none without one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
