"""Kit of environments: whole conversations by the generator `multi-turn`, with an engine that says given answers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.config.sections import EnvironmentSection
from slime_core.protocols import (
    MULTI_TURN,
    Completion,
    Environment,
    GenerateContext,
    SamplingParams,
    Tokenizer,
)
from slime_core.rollout.generators.dialogue import Dialogue
from slime_core.runtime.closing import close_all
from slime_core.samples import Sample, Status
from slime_core.testing.contracts.promises import answering, name_of, require, run_within, sample_of


class ScriptedEngine:
    """Says the given turns one after the other, a token an id; then answers `abort`.

    Args:
        turns: the ids of each.
        aborts_at: how many of all ids are generated before the engine answers `abort`; None generates all.
    """

    def __init__(self, turns: Sequence[Sequence[int]], *, aborts_at: int | None = None) -> None:
        self._turns = [list(turn) for turn in turns]
        self._left = aborts_at

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Return the next turn, or what the limit and the abort leave of it."""
        turn = self._turns.pop(0) if self._turns else []
        said, reason = turn, "stop" if turn else "abort"
        if len(turn) > params.max_new_tokens:
            said, reason = turn[: params.max_new_tokens], "length"
        if self._left is not None and len(said) > self._left:
            said, reason = said[: self._left], "abort"
            self._turns = []
        if self._left is not None:
            self._left -= len(said)
        return Completion(tokens=said, log_probs=[-0.5] * len(said), finish_reason=reason, weight_version="0")


class _Bytes:
    """A token a byte."""

    eos_token_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        return "\n".join(str(message["content"]) for message in messages)

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        return self.encode(text)


def check_environment(
    create: Callable[[], Environment],
    *,
    answers: Sequence[str],
    sample: Sample | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Check an environment: it answers turns, ends within the given ones, answers alike anew, and goes on from its state.

    Args:
        create: its factory, the options bound.
        answers: the policy's turns of a whole conversation, which the last one ends.
        sample: a pending one with prompt ids; that of `1+1=`, whose label is `2`, when not given.
        tokenizer: text to ids, a byte a token when not given.

    Raises:
        ContractError: says which promise is broken.
    """
    where, speaks = f"environment {name_of(create)}", tokenizer or _Bytes()
    begun = sample_of("")
    given = sample or Sample(index=0, group_index=0, prompt=begun.prompt, tokens=begun.tokens, label="2")
    turns = [speaks.encode(answer) for answer in answers]
    with answering(where, "an answer to every turn"):
        whole = run_within(where, _played(create, given, speaks, turns, None))
        record = whole.metadata[MULTI_TURN]
        found = f"{record['turns']} turns ended by {record['ended_by']}"
        ended = whole.status is Status.COMPLETED and record["turns"] == len(turns)
        require(ended, where, found=found, wanted=f"it to be done after the {len(turns)} given ones")
        again = run_within(where, _played(create, given, speaks, turns, None))
        require(_told(again) == _told(whole), where, found="other answers anew", wanted="the same")
        spoken = 0
        for turn in turns:
            for at in {spoken, spoken + len(turn) // 2}:
                part = run_within(where, _played(create, given, speaks, turns, at))
                if part.metadata[MULTI_TURN]["state"] is None or not part.response_length:
                    continue
                rest = [ids[max(0, at - n) :] for n, ids in _starts(turns) if n + len(ids) > at]
                resumed = run_within(where, _played(create, part, speaks, rest, None))
                found = f"another conversation when it goes on after {at} of the policy's tokens"
                require(
                    _told(resumed) == _told(whole), where, found=found, wanted="the same as without an abort"
                )
            spoken += len(turn)


def _starts(turns: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
    """Return each turn with how many of the policy's tokens come before it."""
    return [(sum(map(len, turns[:i])), turn) for i, turn in enumerate(turns)]


async def _played(
    create: Callable[[], Environment],
    sample: Sample,
    tokenizer: Tokenizer,
    turns: Sequence[Sequence[int]],
    aborts_at: int | None,
) -> Sample:
    """Return the sample after a conversation, or a part of it."""
    played = dataclasses.replace(copy.deepcopy(sample), timings={})
    record = played.metadata.get(MULTI_TURN) if played.response_length else None
    dialogue = Dialogue(
        ctx=GenerateContext(engine=ScriptedEngine(turns, aborts_at=aborts_at), tokenizer=tokenizer),
        sample=played,
        params=SamplingParams(max_new_tokens=sum(map(len, turns)) + played.generated_length + 1),
        settings=EnvironmentSection(environment="it", max_turns=1000, max_environment_tokens=10**6),
        name=name_of(create),
        environment=create(),
    )
    try:
        await dialogue.play(record)
    finally:
        await dialogue.close()
        await close_all(list(dialogue.ctx.services.values()))
    played.check()
    return played


def _told(sample: Sample) -> tuple[Any, ...]:
    """Return what is to be alike, however often it was aborted."""
    return sample.tokens, sample.response, sample.loss_mask, sample.reward, sample.metadata
