"""Hooks of slime-agents: its section of settings, and checks of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from slime_core.config.derive import is_local
from slime_core.config.functions import resolve_function
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, PluginError, Problem, SlimeError
from slime_core.files.json_text import shown
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.registry import Registry

from slime_agents.section import AgentsSection

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext

_OF_TEMPLATES = ("tool_format", "chat_template_kwargs")
#: Generator -> the settings that it reads.
_READ = {
    "agent": (
        *_OF_TEMPLATES,
        *("program", "function", "reward", "timeout_s", "host", "port", "max_turns"),
        *("max_requests_at_once", "max_request_mb", "max_refusals"),
    ),
    "roles": (*_OF_TEMPLATES, "roles", "system_prompt"),
    "tool-loop": (
        *_OF_TEMPLATES,
        *("tools", "system_prompt", "examples", "max_turns", "max_tool_tokens", "max_calls_per_turn"),
        *("tool_timeout_s", "max_tool_chars"),
    ),
}


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[agents]`."""
    return [Section("agents", AgentsSection, read_by=_READ)]


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse tools and agents that cannot be built, before anything starts."""
    try:
        chosen = registry.find("slime.generators", settings.rollout.custom_generate_function_path)
    except PluginError:  # core says so
        return []
    if chosen.distribution != "slime-agents" or chosen.name not in _CHECKS:
        return []
    problems: list[Problem] = []
    if settings.data.apply_chat_template:
        told = f"the generator {chosen.name} renders the chat template itself, with tools and all turns"
        problems.append(Problem("data.apply_chat_template", "true", "false", told))
    section = settings.section(AgentsSection)
    try:
        problems += _CHECKS[chosen.name](section, settings, registry)
    except ConfigError as error:
        problems += error.problems
    except SlimeError as error:
        problems.append(Problem("agents", "settings that cannot be used", str(error)))
    return problems


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse tools where neither the settings nor the chat template say how calls of them are written."""
    settings, registry = build.settings, build.registry
    try:
        chosen = registry.find("slime.generators", settings.rollout.custom_generate_function_path)
    except PluginError:  # core says so
        return []
    section = settings.section(AgentsSection)
    if (chosen.distribution, chosen.name) != ("slime-agents", "tool-loop") or section.tool_format is not None:
        return []
    from slime_agents.templates import Templates

    try:
        templates = Templates(section, partial(resolve_function, settings, registry))
        _ = templates.of(build.tokenizer, {}).tool_format
    except ConfigError as error:
        return error.problems
    except SlimeError:  # a tokenizer that cannot be read: the run says so
        return []
    return []


@hookimpl
def slime_check_flags(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse flags of generators that are not chosen; one of somebody else may be made of ours, and read any."""
    from slime_core.checks.chosen_plugins import chosen
    from slime_core.checks.unread_flags import unread_without

    groups = [choice for choice in chosen(settings, registry) if choice.group == "slime.generators"]
    generators = [registry.find(choice.group, choice.reference) for choice in groups]
    names = {each.name for each in generators if each.distribution == "slime-agents"}
    if not names or any(each.distribution not in ("slime-agents", "slime-core") for each in generators):
        return
    for field in AgentsSection.model_fields:
        readers = [name for name, fields in _READ.items() if field in fields]
        if names.isdisjoint(readers):
            wanted = f"--custom-generate-function-path {' or '.join(readers)}"
            yield from unread_without(settings, "agents", [field], wanted=wanted)


def _wrong_tools(section: AgentsSection, settings: Settings, registry: Registry) -> list[Problem]:
    from slime_agents.tools.loop import ToolLoop

    if not section.tools:
        return [Problem("agents.tools", "none", "a table for each tool: [agents.tools.NAME]")]
    ToolLoop(settings=section, resolve=partial(resolve_function, settings, registry))
    if not _chosen_reward(settings):
        told = "give --rm-type, --custom-rm-path or --rm-weights"
        return [Problem("reward.rm_type", "nothing, with the generator tool-loop", "a reward", told)]
    return []


def _wrong_agent(section: AgentsSection, settings: Settings, registry: Registry) -> list[Problem]:
    from slime_agents.endpoints.agent import Agent
    from slime_agents.endpoints.program import PYTHON

    Agent(settings=section, resolve=partial(resolve_function, settings, registry))
    chosen = _chosen_reward(settings)
    if section.reward != "plugin" and chosen:
        told = "a session has one reward; leave one of the two out"
        return [Problem("agents.reward", f"{section.reward!r}, and the reward {chosen}", "one of them", told)]
    if section.reward == "plugin" and not chosen:
        todo = "choose one by --rm-type, or set agents.reward to program or http"
        return [Problem("agents.reward", "'plugin', and no reward", "a reward of the run", todo)]
    program = section.program[0] if section.program and is_local(settings.run) else PYTHON
    if program != PYTHON and shutil.which(program) is None:
        told = "give its path, or set PATH; {python} is the Python that runs slime"
        return [Problem("agents.program", shown(program, 300), "a program that can be run", told)]
    return []


def _wrong_roles(section: AgentsSection, settings: Settings, registry: Registry) -> list[Problem]:
    from slime_agents.roles.table import read_roles

    without = [role.name for role in read_roles(section.roles) if role.reward is None]
    if without and not _chosen_reward(settings):
        found = f"no reward for {', '.join(without)}, and none of the run"
        return [
            Problem("agents.roles", found, "a reward for each role", "set its `reward`, or give --rm-type")
        ]
    return []


def _chosen_reward(settings: Settings) -> str:
    """Return the names of the run's rewards; nothing where it has none."""
    reward = settings.reward
    return reward.custom_rm_path or reward.rm_type or ", ".join(reward.rm_weights)


_CHECKS = {"tool-loop": _wrong_tools, "agent": _wrong_agent, "roles": _wrong_roles}
