"""`Tape`: what a session said, token for token.

An id that the policy sampled is never rendered again. What others say is rendered once, through the chat template, and appended. A
client sends its whole history with each request; as long as that is what it was told, the tape goes on. Where the client changed
it, the tape forks: the new branch shares the other's beginning, and becomes a sample of its own beside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.protocols import GenerateContext, SamplingParams, end_ids
from slime_core.protocols.turn import text_to_stop
from slime_core.rollout.group import reset
from slime_core.runtime.busy import Busy
from slime_core.samples import Sample, Status

from slime_agents.tape.branch import Branch
from slime_agents.tape.messages import Message, difference
from slime_agents.tape.reading import read_turn
from slime_agents.tape.template import ChatTemplate
from slime_agents.tape.turn import Fork, Mark, TapeTurn

#: Key of `Sample.metadata` under which samples of a tape say where they come from.
TAPE = "tape"


class TapeAborted(Exception):
    """The rollout has all that it needs: no turn is generated any more."""


class TapeFull(Exception):
    """No token is left for another turn; the message says of which bound."""


class Tape:
    """The record of one session.

    Args:
        ctx: generates turns, and appends what others say.
        sample: that the session is for; it is left as it is.
        params: how turns are drawn; `max_new_tokens` bounds all turns of the session together.
        template: renders what others say, and says how calls are written.
        name: what ids of calls begin with.
    """

    def __init__(
        self,
        ctx: GenerateContext,
        sample: Sample,
        params: SamplingParams,
        *,
        template: ChatTemplate,
        name: str = "",
    ) -> None:
        self._ctx, self._given, self._params = ctx, sample, params
        self._template, self._name = template, name
        self._ends = end_ids(ctx.tokenizer, params.stop_token_ids)
        self.branches: list[Branch] = []
        self.forks: list[Fork] = []
        self.n_begun = 0
        """Turns that began."""
        self.at_engine = Busy()
        """The time in which the engine generates a turn, or several."""

    @property
    def turns(self) -> list[TapeTurn]:
        """All turns, in the order in which they began."""
        return sorted(
            (turn for branch in self.branches for turn in branch.turns), key=lambda turn: turn.number
        )

    @property
    def n_sampled(self) -> int:
        """Tokens that were sampled, of all branches."""
        return sum(turn.n_sampled for turn in self.turns)

    def count(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> int:
        """Return how many tokens a history has where nothing of it was sampled."""
        return len(self._template.opening(list(messages), tools))

    def history(self, turn: TapeTurn) -> list[Message]:
        """Return what was said up to a turn, the turn included."""
        branch = self.branches[turn.branch]
        n = next(mark.n_messages for mark, one in branch.asked if one is turn)
        return branch.messages[: n + 1]

    async def turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> TapeTurn:
        """Let the policy speak.

        Args:
            messages: the client's whole history, in the form of `tape.messages`; the last one is not the assistant's.
            tools: that the client offers.
            max_tokens: of this turn; None for no bound of its own.
            stop: strings that end this turn, besides those of the run.

        Raises:
            DataError: the chat template refuses the messages, or nobody speaks before the policy.
            TapeAborted: the rollout has all that it needs.
            TapeFull: no token is left.
        """
        wanted, key = list(messages), json.dumps(tools, sort_keys=True, default=str) if tools else ""
        if not wanted or wanted[-1]["role"] == "assistant":
            raise DataError("the last message is the assistant's; wanted one that it answers")
        branch = self._place(wanted, key, tools)
        branch.is_busy = True
        try:
            return await self._speak(branch, wanted, max_tokens, tuple(stop))
        finally:
            branch.is_busy = False

    def samples(self) -> list[Sample]:
        """Return the sample of each branch that has a turn of its own; several share a `rollout_id`.

        `metadata["tape"]` has the branch, its messages, its number of turns, and the fork it began with.
        """
        forks = {fork.branch: fork for fork in self.forks}
        made = [branch for branch in self.branches if branch.asked]
        for branch in made:
            fork = forks.get(branch.number)
            record = {
                "branch": branch.number,
                "turns": len(branch.asked),
                "messages": branch.messages,
                "fork": None if fork is None else fork.to_json(),
            }
            branch.sample.metadata = {**self._given.metadata, TAPE: record}
            if len(made) > 1:
                branch.sample.rollout_id = self._given.index
        return [branch.sample for branch in made]

    def _place(self, wanted: list[Message], key: str, tools: Sequence[Any] | None) -> Branch:
        """Return the branch that a request goes on with, what is new in it appended."""
        fitting = [branch for branch in self.branches if branch.goes_on(wanted, key)]
        if fitting:
            branch = max(fitting, key=lambda one: len(one.messages))
            new = wanted[len(branch.messages) :]
            ids = self._template.between(new, tools, last_id=branch.ends[-1].last_id)
            self._check_room(len(branch.sample.tokens) + len(ids))
            self._ctx.append(branch.sample, ids)
            branch.messages = wanted
            return branch
        return self._forked(wanted, key, tools)

    def _forked(self, wanted: list[Message], key: str, tools: Sequence[Any] | None) -> Branch:
        """Return a new branch: from as far along an earlier one as the histories agree."""
        places = [
            (branch, mark) for branch in self.branches if (mark := branch.shared(wanted, key)) is not None
        ]
        parent, mark = max(places, key=lambda place: place[1].n_tokens, default=(None, None))
        number = len(self.branches)
        if parent is None or mark is None:
            tokens, ends = self._template.opening(wanted, tools), []
        else:
            tokens = list(parent.sample.tokens[: mark.n_tokens])
            ends = [end for end in parent.ends if end.n_tokens <= mark.n_tokens]
            if new := wanted[mark.n_messages :]:
                tokens += self._template.between(new, tools, last_id=mark.last_id)
        if not tokens:
            raise DataError("the chat template renders the messages as nothing; wanted text to go on from")
        self._check_room(len(tokens))
        sample = reset(self._given)
        sample.tokens, sample.session_id = tokens, self._given.session_id
        branch = Branch(number=number, sample=sample, tools=key, messages=wanted, ends=ends)
        if self.branches:
            self.forks.append(self._fork(branch, parent, mark))
        self.branches.append(branch)
        return branch

    def _fork(self, branch: Branch, parent: Branch | None, mark: Mark | None) -> Fork:
        nearest = parent or self.branches[-1]
        if branch.tools != nearest.tools:
            reason = "other tools"
        else:
            reason = difference(nearest.messages, branch.messages)
        return Fork(
            branch=branch.number,
            parent=None if parent is None else parent.number,
            shared_turns=0 if mark is None else mark.n_turns,
            shared_tokens=0 if mark is None else mark.n_tokens,
            reason=reason,
        )

    async def _speak(
        self, branch: Branch, wanted: list[Message], max_tokens: int | None, stop: tuple[str, ...]
    ) -> TapeTurn:
        sample, number = branch.sample, self.n_begun
        left = self._params.max_new_tokens - self.n_sampled
        if left < 1:
            raise TapeFull(f"the session has sampled its {self._params.max_new_tokens} tokens")
        self.n_begun += 1
        if sample.status is Status.TRUNCATED:  # a turn that was cut off is history like any other
            sample.status = Status.COMPLETED
        asked_at = Mark(len(wanted), len(sample.tokens), len(branch.ends))
        most = sample.generated_length + min(left, left if max_tokens is None else max_tokens)
        seed = self._params.seed
        params = dataclasses.replace(
            self._params,
            max_new_tokens=most,
            stop=(*self._params.stop, *stop),
            # A branch that begins where another one went on is to draw something else there.
            seed=None if seed is None else seed + (branch.number << 32),
        )
        n_before = len(sample.tokens)
        self.at_engine.add(1)
        try:
            await self._ctx.turn(sample, params)
        finally:
            self.at_engine.add(-1)
        ids = list(sample.tokens[n_before:])
        if sample.status is Status.ABORTED:
            raise TapeAborted("the rollout has all that it needs")
        last_id = ids[-1] if ids and ids[-1] in self._ends else None
        turn = self._read(branch, number, ids, last_id, params.stop, asked_at)
        branch.messages = [*wanted, turn.message]
        branch.ends.append(Mark(len(branch.messages), len(sample.tokens), asked_at.n_turns + 1, last_id))
        branch.asked.append((asked_at, turn))
        return turn

    def _read(
        self,
        branch: Branch,
        number: int,
        ids: list[int],
        last_id: int | None,
        stop: tuple[str, ...],
        asked: Mark,
    ) -> TapeTurn:
        """Read what was sampled."""
        said = ids if last_id is None else ids[:-1]
        before = branch.sample.tokens[: asked.n_tokens]
        stopped = branch.sample.status is Status.COMPLETED and last_id is None
        text, ended_by = text_to_stop(
            before, said, stop if stopped else (), self._ctx.tokenizer, skip_special_tokens=False
        )
        tools = json.loads(branch.tools) if branch.tools else []
        reading = read_turn(
            text.removesuffix(ended_by or ""), self._template.tool_format if tools else None, tools
        )
        message = reading.message(f"call_{self._name}_{number}_")
        reason = "length" if branch.sample.status is Status.TRUNCATED else "stop"
        return TapeTurn(
            number=number,
            branch=branch.number,
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") and reason == "stop" else reason,
            stop_string=ended_by,
            calls=reading.calls,
            n_prompt=asked.n_tokens,
            n_sampled=len(ids),
        )

    def _check_room(self, n_tokens: int) -> None:
        """Refuse a history that leaves no room for a turn, before anything of it is appended."""
        most = self._ctx.max_context_len
        if most is not None and n_tokens >= most:
            raise TapeFull(f"the history has {n_tokens} tokens, of at most {most} with the answer")
