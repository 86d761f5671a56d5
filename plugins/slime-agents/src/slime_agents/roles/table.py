"""`AgentRole`: one entry of the setting `agents.roles`, and reading them."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError, Problem

_FIELDS = {"name": str, "prompt": str, "system_prompt": str, "reward": str, "train": bool}


@dataclass(frozen=True, kw_only=True)
class AgentRole:
    """Who speaks."""

    name: str
    prompt: str
    """What it is asked, with `{task}` and the names of roles before it."""
    system_prompt: str | None = None
    """What the system says to it; that of all roles where it is None."""
    reward: str | None = None
    """The reward that scores it; the run's where it is None."""
    train: bool = True
    """Whether it is trained on."""

    def asked(self, task: str, said: Mapping[str, str]) -> str:
        """Return what it is asked about a task, given what the roles before it said."""
        parts = string.Formatter().parse(self.prompt)
        given = {"task": task, **said}
        return "".join(before + (given[name] if name is not None else "") for before, name, _, _ in parts)


def read_roles(entries: Sequence[Mapping[str, Any]]) -> list[AgentRole]:
    """Return the roles of the setting, in their order.

    Raises:
        ConfigError: there are none, or carries a problem for each entry that is none.
    """
    if not entries:
        raise ConfigError([Problem("agents.roles", "none", "a table for each role: [[agents.roles]]")])
    roles: list[AgentRole] = []
    problems: list[Problem] = []
    for i, entry in enumerate(entries):
        where = f"agents.roles[{i}]"
        why = _wrong(entry, [role.name for role in roles])
        if why is None:
            roles.append(AgentRole(**entry))
        else:
            problems.append(Problem(where, *why))
    if problems:
        raise ConfigError(problems)
    return roles


def _wrong(entry: Mapping[str, Any], earlier: Sequence[str]) -> tuple[str, str] | None:
    """Return (found, wanted) of an entry that is no role; None where it is one."""
    for key, value in entry.items():
        if key not in _FIELDS:
            return f"the key {key!r}", f"one of {', '.join(_FIELDS)}"
        if not isinstance(value, _FIELDS[key]):
            return f"{key} = {value!r}", f"{_FIELDS[key].__name__}"
    if missing := [key for key in ("name", "prompt") if key not in entry]:
        return f"no {missing[0]}", "name and prompt"
    if entry["name"] in (*earlier, "task") or not entry["name"].isidentifier():
        return f"the name {entry['name']!r}", "a word of its own"
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(entry["prompt"]) if name is not None]
    except ValueError as error:
        return f"a prompt that cannot be read ({error})", "text with {task}; a brace itself is written twice"
    if unknown := [name for name in names if name not in (*earlier, "task")]:
        return (
            f"{{{unknown[0]}}} in its prompt",
            f"{{task}}, or a role before it: {', '.join(earlier) or 'none'}",
        )
    return None
