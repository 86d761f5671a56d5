"""`Templates`: the chat template of a run, with the settings that it is used by; made once for samples without variables of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.config.functions import Resolve
from slime_core.protocols import Tokenizer

from slime_agents.formats.choice import chosen_format, known_formats
from slime_agents.section import AgentsSection
from slime_agents.tape.template import ChatTemplate


class Templates:
    """Makes chat templates.

    Args:
        settings: with the format of calls, and variables of the template.
        resolve: finds the format.
    """

    def __init__(self, settings: AgentsSection, resolve: Resolve) -> None:
        self._variables = settings.chat_template_kwargs
        self._format, self._known = chosen_format(settings.tool_format, resolve), known_formats()
        self._made: ChatTemplate | None = None

    def of(self, tokenizer: Tokenizer, own: Mapping[str, Any]) -> ChatTemplate:
        """Return the chat template of a tokenizer, with variables that a sample has of its own."""
        if own:
            return ChatTemplate(
                tokenizer, {**self._variables, **own}, tool_format=self._format, known=self._known
            )
        if self._made is None:
            self._made = ChatTemplate(tokenizer, self._variables, tool_format=self._format, known=self._known)
        return self._made
