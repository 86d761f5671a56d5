"""The groups of slime-agents. Imports nothing heavy."""

from slime_core.plugins.groups import Call, Group

TOOLS = Group(
    "slime.tools",
    (),
    "(name: str, limits: Limits, *, options) -> Toolset",
    "what answers calls of tools; chosen by `kind` in `[agents.tools.NAME]`",
    Call(("name", "limits"), takes_options=True),
)
"""Kinds of tools; see `slime_agents.tools.tool.Toolset`."""

TOOL_FORMATS = Group(
    "slime.tool_formats",
    ("--agents-tool-format",),
    "(*, options) -> ToolFormat",
    "how a model writes calls of tools",
    Call((), takes_options=True),
)
"""Ways to write calls; see `slime_agents.formats.calls.ToolFormat`."""
