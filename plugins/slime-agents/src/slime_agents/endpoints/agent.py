"""The generator `agent`: runs an agent program for each sample, and trains on what the policy said in its session."""

from __future__ import annotations

import asyncio
import copy
import errno
import inspect
import secrets
from typing import Any

from slime_core.config.functions import Resolve
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.importing import IMPORT_FAILURES, import_object
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.protocols.rollout import rendering_prompt
from slime_core.rollout.group import reset
from slime_core.samples import Sample, Status

from slime_agents.endpoints.program import AgentFunction, Outcome, run_function, run_program
from slime_agents.endpoints.server import Endpoint
from slime_agents.endpoints.session import Session, SessionLimits
from slime_agents.section import AgentsSection
from slime_agents.tape.tape import TAPE, Tape
from slime_agents.templates import Templates

#: Key of `Sample.metadata` under which the generator says how a session went.
AGENT = "agent"
#: Errors by which a command line is no program. Any other is of one sample or of a busy moment, and fails that sample alone.
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


@rendering_prompt
class Agent:
    """Runs a program that knows nothing of slime, and gives it an address and a key by which it asks the policy.

    The address speaks OpenAI's Chat Completions and Responses and Anthropic's Messages. Each sample has a session of its own. A client
    that changes its history forks it: each branch becomes a sample, and they share a `rollout_id`. `metadata["tape"]` has the
    messages of a branch, `metadata["agent"]` how the session went.
    """

    def __init__(self, *, settings: AgentsSection, resolve: Resolve) -> None:
        self._settings = settings
        self._templates = Templates(settings, resolve)
        self._function = agent_function(settings)
        self._limits = SessionLimits(
            max_turns=settings.max_turns,
            max_requests_at_once=settings.max_requests_at_once,
            max_refusals=settings.max_refusals,
        )
        self._endpoint = Endpoint(
            settings.host, settings.port, max_request_bytes=int(settings.max_request_mb * 1e6)
        )
        self._opening: asyncio.Task[None] | None = None

    async def __call__(
        self, ctx: GenerateContext, sample: Sample, params: SamplingParams
    ) -> Sample | list[Sample]:
        """Run the program of one sample."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._endpoint.open(), name="agents")
        await asyncio.shield(self._opening)
        template = self._templates.of(ctx.tokenizer, sample.apply_chat_template_kwargs)
        name = secrets.token_hex(8)
        tape = Tape(ctx, sample, params, template=template, name=name)
        session = Session(id=name, tape=tape, limits=self._limits)
        base_url = self._endpoint.add(session)
        ending = asyncio.create_task(session.end_with(ctx.over), name=f"end of session {name}")
        try:
            with ctx.outside_engine(sample):
                outcome = await self._run(base_url, session, sample)
        finally:
            ending.cancel()
            # The engine answered within the program's time.
            sample.non_generation_time -= tape.at_engine.take()
            await self._endpoint.remove(session)
        return self._finished(sample, session, outcome)

    async def close(self) -> None:
        """Close the endpoint."""
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await self._endpoint.close()

    async def _run(self, base_url: str, session: Session, sample: Sample) -> Outcome:
        of_before = (TAPE, AGENT)  # what an earlier attempt left
        metadata = {key: value for key, value in sample.metadata.items() if key not in of_before}
        task = {"prompt": sample.prompt, "index": sample.index, "metadata": metadata}
        timeout_s, over = self._settings.timeout_s, session.is_over
        if self._function is None:
            command = self._settings.program
            try:
                return await run_program(command, base_url, session.key, task, timeout_s=timeout_s, over=over)
            except OSError as error:
                told = f"agents.program: {command[0]} cannot be run: {error.strerror}"
                if error.errno in _NO_PROGRAM:
                    raise PluginError(told) from error
                return Outcome(ended_by="error", reward=0.0, output=told)
        task = copy.deepcopy(task)
        return await run_function(self._function, base_url, session.key, task, timeout_s=timeout_s, over=over)

    def _finished(self, sample: Sample, session: Session, outcome: Outcome) -> Sample | list[Sample]:
        if session.is_aborted:
            return _as_aborted(sample)
        if session.failure is not None:
            raise session.failure
        samples = session.tape.samples() or [reset(sample)]
        reward, failure = self._reward(session, outcome)
        n_turns = len(session.tape.turns)
        if not n_turns:
            failure = f"{sample.name}: its agent had no turn of the policy; it ended by {outcome.ended_by}: {outcome.output}"
        ended_by = session.hit or outcome.ended_by
        record = {
            **session.record(), "turns": n_turns, "ended_by": ended_by, "exit": outcome.status, "output": outcome.output,
        }  # fmt: skip
        for one in samples:
            one.metadata = {**one.metadata, AGENT: record}
            one.non_generation_time = sample.non_generation_time
            if failure is not None:
                one.status, one.failure = Status.FAILED, failure
            elif ended_by not in ("exit", "error"):
                one.status = Status.TRUNCATED
            if self._settings.reward != "plugin" and failure is None:
                one.reward = reward
        return samples if len(samples) > 1 else samples[0]

    def _reward(self, session: Session, outcome: Outcome) -> tuple[float | None, str | None]:
        """Return the session's reward, and why it has none where it is to have one."""
        if self._settings.reward == "plugin":
            return None, None
        if self._settings.reward == "program" and outcome.reward is not None:
            return outcome.reward, None
        if self._settings.reward == "http" and session.reward is not None:
            return session.reward, None
        wanted = "posted no reward" if self._settings.reward == "http" else "returned no number"
        return None, f"its agent {wanted}, and ended by {outcome.ended_by}: {outcome.output}"


def agent_function(settings: AgentsSection) -> AgentFunction | None:
    """Return the function that is called for each sample; None where a program is run.

    Raises:
        ConfigError: not one of the two is given, or the function does not import, or is not async.
    """
    given, is_program = settings.function, bool(settings.program)
    if (given is not None) == is_program:
        found = "both" if is_program else "neither"
        raise ConfigError(
            [Problem("agents.program, agents.function", found, "one of them: what the agent is")]
        )
    if given is None:
        return None
    try:
        function: Any = import_object(given)
    except IMPORT_FAILURES as error:
        raise ConfigError(
            [
                Problem(
                    "agents.function",
                    f"{given!r}, which does not import ({type(error).__name__}: {error})",
                    "module:function",
                )
            ]
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            [Problem("agents.function", f"{given!r}, which is not async", "async (base_url, api_key, task)")]
        )
    return function  # type: ignore[no-any-return]  # checked above


def _as_aborted(sample: Sample) -> Sample:
    """Return a sample whose session begins anew: a program cannot be put away and taken out again."""
    sample.status = Status.ABORTED
    return sample
