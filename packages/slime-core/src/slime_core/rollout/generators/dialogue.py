"""`Dialogue`: the turns of policy and environment in one response, its budgets and its record."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_core.config.sections import EnvironmentSection
from slime_core.errors import DeadlineError, EnvironmentFailure
from slime_core.files.json_text import shown, why_not_text
from slime_core.protocols import (
    MULTI_TURN,
    Environment,
    GenerateContext,
    Observation,
    SamplingParams,
    end_ids,
)
from slime_core.protocols.turn import text_to_stop
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.runtime.deadline import within
from slime_core.samples import Sample, Status

logger = logging.getLogger(__name__)

#: Why a conversation ended: the environment said so, or which budget was spent, or the rollout has all that it needs.
DONE, ABORTED = "done", "aborted"
MAX_TURNS, MAX_NEW_TOKENS, MAX_CONTEXT = "max_turns", "max_new_tokens", "max_context_len"
MAX_ENVIRONMENT_TOKENS = "max_environment_tokens"


@dataclass(kw_only=True)
class Dialogue:
    """One sample and the environment that answers it."""

    ctx: GenerateContext
    sample: Sample
    params: SamplingParams
    """Of the whole response."""
    settings: EnvironmentSection
    name: str
    """How messages call the environment."""
    environment: Environment
    turns: int = 0
    """Turns of the policy that the environment has answered."""
    reward: float | None = None
    """Sum of the environment's rewards; None while it gave none."""
    info: list[dict[str, Any]] = field(default_factory=list)
    siblings: list[Sample] = field(default_factory=list)

    async def play(self, record: Mapping[str, Any] | None) -> None:
        """Play to the end, or to an abort, and write the record.

        Args:
            record: of the conversation as it was aborted; None begins one.

        Raises:
            EnvironmentFailure: the environment raised, hung, or answered something unusable.
        """
        if (use := getattr(self.environment, "use", None)) is not None:
            use(self.ctx.services)
        if record is None:
            opening = await self._ask("reset", lambda: self.environment.reset(self.sample))
            ended = self._open(*self._ids(opening)) if opening is not None else None
        else:
            self.turns, self.reward, self.info = record["turns"], record["reward"], list(record["info"])
            state = record["state"]
            await self._ask("restore", lambda: self.environment.restore(self.sample, state))
            ended = None
        while ended is None:
            ended = await self._turn()
        if ended not in (DONE, ABORTED) and self.sample.status is not Status.FAILED:
            self.sample.status = Status.TRUNCATED
        self._write(ended)

    async def close(self) -> None:
        """Close the environment.

        Raises:
            EnvironmentFailure: it raised or hung.
        """
        await self._ask("close", self.environment.close)

    async def _turn(self) -> str | None:
        """Let the policy speak and the environment answer; returns why the conversation ends, None if it goes on."""
        if self.ctx.remaining(self.sample, self.params).max_new_tokens < 1:
            return self._spent()
        await self.ctx.turn(self.sample, self.params)
        if self.sample.status is Status.ABORTED:
            return ABORTED
        text = self._said()
        observation = self._checked(await self._ask("step", lambda: self.environment.step(self.sample, text)))
        self.turns += 1
        if observation.reward is not None:
            self.reward = (self.reward or 0.0) + observation.reward
        self.info.append(dict(observation.info))
        self.siblings += observation.siblings
        if self.sample.status is Status.TRUNCATED:
            return self._spent()
        said = self._ids(observation.content)
        if observation.done:
            if said[0]:  # what ends no turn of the policy leaves no mark
                self._put(*said)
            return DONE
        if self.turns >= self.settings.max_turns:
            return MAX_TURNS
        if self.ctx.remaining(self.sample, self.params).max_new_tokens < 1:
            return self._spent()
        return self._put(*said)

    def _said(self) -> str:
        """Return the text of the last turn, without the id that ends a sequence, or what its last token spells after a stop string."""
        before = self.sample.response_tokens[: self.sample.turn_begin]
        ids = self.sample.response_tokens[self.sample.turn_begin :]
        stop = self.params.stop if self.sample.status is Status.COMPLETED else ()
        if len(ids) and self._ends_sequence(int(ids[-1])):
            ids, stop = ids[:-1], ()
        skip = self.params.skip_special_tokens
        return text_to_stop(before, ids, stop, self.ctx.tokenizer, skip_special_tokens=skip)[0]

    def _ends_sequence(self, last: int) -> bool:
        """Return whether an id ends a sequence: by the tokenizer or the model, or as a special token that the request stops at.

        Others that it stops at stay in the text, as stop strings do: an environment may look for what they spell.
        """
        if last in end_ids(self.ctx.tokenizer):
            return True
        if last not in self.params.stop_token_ids:
            return False
        spelled = self.ctx.tokenizer.decode([last], skip_special_tokens=False)
        return up_to_special_tokens(spelled) != spelled

    def _open(self, ids: list[int], text: str | None) -> str | None:
        """Append what the environment says first. Where there is no room for it nobody can say anything, and the sample fails."""
        if (ended := self._put(ids, text)) is not None:
            flag = (
                "--max-environment-tokens" if ended == MAX_ENVIRONMENT_TOKENS else "the bound on the context"
            )
            self.sample.status = Status.FAILED
            self.sample.failure = f"{self._who()}: what it says first has {len(ids)} tokens, and there is no room for them; raise {flag}"
            logger.warning("%s", self.sample.failure)
        return ended

    def _put(self, ids: list[int], text: str | None) -> str | None:
        """Append what the environment says, if there is room for it; returns the budget that it breaks."""
        if self.sample.environment_length + len(ids) > self.settings.max_environment_tokens:
            return MAX_ENVIRONMENT_TOKENS
        most = self.ctx.max_context_len
        if most is not None and len(self.sample.tokens) + len(ids) > most:
            return MAX_CONTEXT
        self.ctx.append(self.sample, ids, text=text)
        return None

    def _spent(self) -> str:
        """Return which bound on the policy's tokens is reached."""
        most = self.ctx.max_context_len
        return MAX_CONTEXT if most is not None and len(self.sample.tokens) >= most else MAX_NEW_TOKENS

    def _write(self, ended: str) -> None:
        """Write the record into the sample's metadata, and the environment's reward into the sample."""
        record: dict[str, Any] = {
            "environment": self.name,
            "turns": self.turns,
            "environment_tokens": self.sample.environment_length,
            "ended_by": ended,
            "reward": self.reward,
            "info": self.info,
        }
        if ended == ABORTED:
            record["state"] = self._state()
        self.sample.metadata = {**self.sample.metadata, MULTI_TURN: record}
        if ended != ABORTED and self.reward is not None:
            self.sample.reward = self.reward

    def _state(self) -> Any:
        """Return the environment's state as JSON values."""
        try:
            return json.loads(json.dumps(self.environment.state()))
        except BaseException as error:
            raise self._failure(f"state() raised {type(error).__name__}: {error}") from error

    async def _ask(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Call the environment under its deadline, and count the time."""
        seconds = self.settings.environment_timeout_s

        async def answer() -> Any:
            try:
                answering = call()
                if not inspect.isawaitable(answering):
                    raise self._failure(f"{what} is not async: it returned {type(answering).__name__}")
                return await answering
            except (asyncio.CancelledError, GeneratorExit, EnvironmentFailure):
                raise
            except (
                BaseException
            ) as error:  # sys.exit() in an environment must not end the run as if it were done
                raise self._failure(f"{what} raised {type(error).__name__}: {error}") from error

        with self.ctx.outside_engine(self.sample):
            try:
                return await within(seconds, f"{self._who()}: {what}", answer())
            except DeadlineError as error:
                told = f"{what} gave no answer within {seconds:g} s (--environment-timeout-s)"
                failure = self._failure(told)
                for note in getattr(error, "__notes__", ()):
                    failure.add_note(note)
                raise failure from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise self._failure(f"{what} raised CancelledError, and nobody had cancelled it") from error

    def _checked(self, found: Any) -> Observation:
        """Return an observation whose fields have their types; its content is checked where it is read."""
        if not isinstance(found, Observation):
            raise self._failure(
                f"step returned {shown(found)[:60]} ({type(found).__name__}); wanted an Observation"
            )
        reward = found.reward
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
        if reward is not None and not is_number:
            raise self._failure(f"step gave the reward {reward!r}; wanted a finite number, or None")
        if not isinstance(found.info, Mapping):
            raise self._failure(f"step gave the info {type(found.info).__name__}; wanted a mapping")
        if not all(isinstance(one, Sample) for one in found.siblings):
            raise self._failure("step gave siblings that are no Samples; wanted Samples")
        return found

    def _ids(self, content: Any) -> tuple[list[int], str | None]:
        """Return the ids of what the environment says, and the text if it is one."""
        if isinstance(content, str):
            if why := why_not_text(content):
                raise self._failure(f"found text with {why}; wanted text that has a UTF-8 form")
            return self.ctx.tokenizer.encode(content), content
        is_list = isinstance(content, Sequence | np.ndarray) and not isinstance(content, bytes)
        if not is_list or not all(isinstance(one, int | np.integer) and one >= 0 for one in content):
            raise self._failure(f"found {shown(content)[:60]}; wanted text, or token ids")
        return [int(one) for one in content], None

    def _who(self) -> str:
        return f"{self.sample.name}: the environment {self.name}"

    def _failure(self, what: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self._who()}: {what}")
