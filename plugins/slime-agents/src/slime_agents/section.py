"""Settings of agents: their tools, the programs that are run, and the endpoint that these ask."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from slime_core.config.base import Count, Index, Seconds, SectionModel


class AgentsSection(SectionModel):
    """Agents: the generators `tool-loop` and `agent`."""

    tools: dict[str, dict[str, Any]] = {}
    """Tools of `tool-loop`, by name: a table each, whose `kind` says what answers (`python`, `http`, `mcp`, `code`), with the
    options of that kind, and `timeout_s` and `max_chars` where they are not the ones of all."""
    tool_format: str | None = None
    """How the model writes calls; when not given, as its chat template does, or `json` where that shows neither tools nor calls."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    system_prompt: str | None = None
    """What the system says first in a `tool-loop`, where a prompt has no such message of its own."""
    examples: list[dict[str, Any]] = []
    """Messages that come before each prompt of a `tool-loop`, calls and results among them, as OpenAI's Chat Completions has them."""
    max_turns: Count = 8
    """Most turns of the policy in one session; one that wants more is cut off."""
    max_tool_tokens: Count = 4096
    """Most tokens of tool results in one `tool-loop`, which are beyond `rollout_max_response_len`."""
    max_calls_per_turn: Count = 16
    """Most calls of one turn that are answered; those beyond are told so."""
    tool_timeout_s: Seconds = 30
    """Deadline of one call of a tool, seconds; of the kind `code`, what a program has once it runs."""
    max_tool_chars: Count = 8000
    """Most characters of one result; what is longer is cut."""
    program: list[str] = []
    """Command line of the program that is run for each sample under the generator `agent`; `{python}` stands for this
    interpreter."""
    function: str | None = None
    """Function that is called in place of a program, `module:function`: `async (base_url, api_key, task)`."""
    reward: Literal["program", "http", "plugin"] = "plugin"
    """Where a session's reward comes from: the number that the function returns, or 1 for a program that exits with 0 and 0 for
    one that does not; what the program posts to `/reward`; or the run's reward over each finished sample."""
    timeout_s: Seconds = 600
    """Deadline of one session, seconds; a program that misses it is killed."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens at."""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port that the endpoint listens at; a free one when 0."""
    max_requests_at_once: Count = 8
    """Most requests of one session in flight; those beyond are refused."""
    max_request_mb: Annotated[float, Ge(0.01), Le(1024)] = 16
    """Most megabytes of one request."""
    max_refusals: Index = 100
    """Refused requests of one session after which it is ended."""
    roles: list[dict[str, Any]] = []
    """Roles of the generator `roles`, in the order in which they speak: tables with `name`, `prompt`, and where wanted
    `system_prompt`, `reward` (its name) and `train`."""
