"""The environment `openenv`: a server of OpenEnv answers the policy."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from slime_core.errors import ConfigError, Problem
from slime_core.protocols import Environment, Observation
from slime_core.samples import Sample, Status

from slime_agents.environments.openenv_session import BadAction, HttpSession, OpenEnvSession, SocketSession

#: Key of `Sample.metadata` with what an episode is reset with, such as `{"seed": 3}` or a task's id.
OPENENV = "openenv"
OBSERVATION, ERROR = "{observation}", "{error}"


class OpenEnv(Environment):
    """Takes each turn of the policy as an action of an OpenEnv server, and answers with the observation.

    An action is an object: the turn's text is its field `action_field`, or, if that is empty, the turn is JSON that is the
    object. One that the server refuses as malformed is answered by the reason, and the policy may try again. The server's rewards add
    up to the sample's. Begins anew when it is aborted.

    Args:
        url: of the server, as in `http://127.0.0.1:8000`.
        transport: `socket` has an episode of its own for each conversation; `http` is for servers with one environment and without
            sessions, one conversation at a time, which is checked.
        action_field: field of the action that the turn's text becomes.
        action_args: further fields of each action.
        action_regex: regular expression whose first group is the action in a turn; all of the turn when not given. A turn without
            one is answered like a malformed action.
        reset_args: what episodes are reset with; those in a sample's metadata under `openenv` take their places.
        observation_field: field of observations that the policy reads; all of them as JSON when not given.
        opening: what stands before the first turn, with `{observation}` where the first one goes.
        template: what stands after a turn, with `{observation}`.
        error_template: what stands after a malformed one, with `{error}`.
        wait_s: how long a conversation waits for a free session, seconds; within `environment_timeout_s`.
    """

    def __init__(
        self,
        *,
        url: str,
        transport: Literal["socket", "http"] = "socket",
        action_field: str = "message",
        action_args: dict[str, Any] | None = None,
        action_regex: str | None = None,
        reset_args: dict[str, Any] | None = None,
        observation_field: str | None = None,
        opening: str = "{observation}\n",
        template: str = "\n{observation}\n",
        error_template: str = "\nerror: {error}\n",
        wait_s: float = 30.0,
    ) -> None:
        _check(url, action_regex, template=template, error_template=error_template)
        self._url, self._transport, self._wait_s = url, transport, wait_s
        self._field, self._action_args, self._regex = action_field, action_args or {}, action_regex
        self._reset_args, self._observation_field = reset_args or {}, observation_field
        self._opening, self._template, self._error_template = opening, template, error_template
        self._session: OpenEnvSession | None = None

    async def reset(self, sample: Sample) -> str:
        """Begin an episode; returns its first observation."""
        if self._transport == "socket":
            self._session = SocketSession(self._url, wait_s=self._wait_s)
        else:
            self._session = HttpSession(self._url, episode_id=f"{sample.index}-{uuid.uuid4().hex[:8]}")
        own = sample.metadata.get(OPENENV) or {}
        answer = await self._session.reset({**self._reset_args, **own})
        return self._opening.replace(OBSERVATION, self._shown(answer["observation"]))

    async def step(self, sample: Sample, text: str) -> Observation:
        """Take the turn as an action."""
        if sample.status is Status.TRUNCATED:
            return Observation(done=True, reward=0.0)
        assert self._session is not None
        try:
            answer = await self._session.step(self._action(text))
        except BadAction as error:
            said = self._error_template.replace(ERROR, str(error))
            return Observation(content=said, reward=0.0, info={"error": str(error)})
        said = self._template.replace(OBSERVATION, self._shown(answer["observation"]))
        return Observation(content=said, done=answer["done"], reward=float(answer["reward"] or 0.0))

    async def close(self) -> None:
        """End the episode."""
        if self._session is not None:
            await self._session.close()

    def _action(self, text: str) -> Mapping[str, Any]:
        """Return the action of a turn.

        Raises:
            BadAction: there is none.
        """
        if self._regex is not None:
            found = re.search(self._regex, text, re.DOTALL)
            if found is None:
                raise BadAction(f"no action: nothing matches {self._regex}")
            text = found[1] or ""
        if self._field:
            return {**self._action_args, self._field: text.strip()}
        try:
            action = json.loads(text)
        except ValueError as error:
            raise BadAction(f"the action is not JSON: {error}") from error
        if not isinstance(action, dict):
            raise BadAction(f"the action is a JSON {type(action).__name__}; wanted an object")
        return {**self._action_args, **action}

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """Return what the policy reads of an observation.

        Raises:
            KeyError: it has no such field.
        """
        if self._observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation_field not in observation:
            raise KeyError(
                f"{self._url}: the observation has {sorted(observation)}; wanted observation_field {self._observation_field!r}"
            )
        value = observation[self._observation_field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check(url: str, regex: str | None, **templates: str) -> None:
    """Raise ConfigError with all that is wrong with the options."""
    problems = []
    if not re.match(r"https?://[^/]", url):
        problems.append(Problem("environment_args.url", repr(url), "http://HOST:PORT"))
    for name, wanted in (("template", OBSERVATION), ("error_template", ERROR)):
        if wanted not in templates[name]:
            problems.append(Problem(f"environment_args.{name}", repr(templates[name]), f"text with {wanted}"))
    try:
        if regex is not None and re.compile(regex).groups < 1:
            problems.append(
                Problem("environment_args.action_regex", repr(regex), "a group around the action")
            )
    except re.error as error:
        wanted = f"a regular expression ({error})"
        problems.append(Problem("environment_args.action_regex", repr(regex), wanted))
    if problems:
        raise ConfigError(problems)
