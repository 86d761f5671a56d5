"""Choosing how a model writes calls: by name, or by what its chat template writes."""

from __future__ import annotations

from slime_core.config.functions import Resolve

from slime_agents.formats.calls import ToolFormat
from slime_agents.formats.glm import Glm
from slime_agents.formats.hermes import Hermes
from slime_agents.formats.llama import Llama
from slime_agents.formats.qwen3_coder import Qwen3Coder


def known_formats() -> tuple[ToolFormat, ...]:
    """Return the formats that are looked for in a chat template; the first is that of a template which shows neither tools nor calls."""
    return (Hermes(), Glm(), Qwen3Coder(), Llama())


def chosen_format(name: str | None, resolve: Resolve) -> ToolFormat | None:
    """Return a format by its name; None where none is chosen.

    Raises:
        PluginError: there is none of that name.
    """
    if name is None:
        return None
    made: ToolFormat = resolve("slime.tool_formats", name, where="agents.tool_format", explicit={})()
    return made
