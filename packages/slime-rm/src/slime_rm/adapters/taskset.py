"""A taskset of verifiers v1, loaded as verifiers does. The only module that imports verifiers, which takes seconds."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_core.errors import ConfigError, PluginError, Problem


class LoadedTaskset:
    """A taskset that slime can play: one prompt, one response, and rewards that read them.

    Args:
        name: id of the taskset.
        options: its configuration.

    Raises:
        ConfigError: no taskset is named, or it refuses the options.
        PluginError: verifiers or the taskset is not installed; or the taskset brings what slime has not: an environment
            of its own, tools, or tasks that are prepared or scored in verifiers' sandboxes.
    """

    def __init__(self, name: str | None, options: Mapping[str, Any]) -> None:
        if not name:
            wanted = "the id of an installed taskset"
            raise ConfigError([Problem("verifiers.taskset", "nothing", wanted, "give --verifiers-taskset")])
        self.name = name
        try:
            self._vf: Any = importlib.import_module("verifiers.v1")
        except ImportError as error:
            raise PluginError(
                f"tasksets of verifiers need verifiers 0.4, which is not installed or does not import: {error}"
            ) from error
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        try:
            kind = loaders.taskset_class(name)
            own_environment = loaders.environment_class(name)
            config_type = loaders.taskset_config_type(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise PluginError(f"verifiers.taskset: {error}") from error
        try:
            self._config: Any = config_type.model_validate({**options, "id": name})
        except ValueError as error:
            shown = "; ".join(str(error).splitlines()[1:3])
            raise ConfigError([Problem("verifiers.taskset_args", repr(dict(options)), shown)]) from error
        self._kind = kind
        self._task_type: Any = kind.task_type()
        self._check_playable(own_environment)

    @property
    def endless(self) -> bool:
        """Whether its tasks have no end."""
        return bool(self._kind.INFINITE)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the data of each task, as JSON values."""
        for task in self._kind(self._config):
            yield task.data.model_dump(mode="json", exclude_none=True)

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the conversation that a task begins with."""
        prompt = row.get("prompt")
        system = row.get("system_prompt")
        begin = [{"role": "system", "content": system}] if system else []
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        return [*begin, *asked]

    async def score(self, row: Mapping[str, Any], response: str, *, truncated: bool) -> Any:
        """Return the trace of a response to a task, scored by the task's own rewards and metrics."""
        vf = self._vf
        task = self._task_type(self._task_type.data_type().model_validate(row), self._config.task)
        self._check_scored_offline(task)
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        messages = [*self.messages(row), {"role": "assistant", "content": response}]
        for place, message in enumerate(messages):
            parent = place - 1 if place else None
            last = place == len(messages) - 1
            trace.nodes.append(
                vf.MessageNode.model_validate({"parent": parent, "message": message, "sampled": last})
            )
        reason = "length" if truncated else "stop"
        trace.calls.append(vf.ModelCall(node=len(messages) - 1, finish_reason=reason))
        trace.stop("agent_completed")
        trace.ok = True
        await task.score(trace)
        return trace

    def _check_playable(self, environment: Any) -> None:
        vf, kind = self._vf, self._task_type
        brings = []
        if environment is not vf.SingleAgentEnv:
            brings.append(f"an environment of its own, {environment.__name__}")
        if _overrides(kind, vf.Task, "toolsets") or _overrides(self._kind, vf.Taskset, "toolsets"):
            brings.append("tools")
        if kind.NEEDS_CONTAINER:
            brings.append("tasks that need a container")
        brings += [
            f"tasks with {name}()" for name in ("setup", "finalize") if _overrides(kind, vf.Task, name)
        ]
        self._refuse(brings)

    def _check_scored_offline(self, task: Any) -> None:
        scorers = [
            *task.hooks("reward"),
            *task.hooks("metric"),
            *(judge.score for judge in task.plugged_judges()),
        ]
        if not scorers:
            raise PluginError(f"verifiers.taskset: {self.name} has no rewards")
        self._refuse(
            [
                f"the scorer {scorer.__name__}, which needs a sandbox"
                for scorer in scorers
                if _needs_runtime(scorer)
            ]
        )

    def _refuse(self, brings: Sequence[str]) -> None:
        if brings:
            raise PluginError(
                f"verifiers.taskset: {self.name} brings {', '.join(brings)}; slime plays tasksets of one prompt, one "
                "response, and rewards that read them"
            )


def _overrides(kind: type, base: type, name: str) -> bool:
    own, inherited = getattr(kind, name), getattr(base, name)
    return getattr(own, "__func__", own) is not getattr(inherited, "__func__", inherited)


def _needs_runtime(scorer: Any) -> bool:
    parameter = inspect.signature(scorer).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
