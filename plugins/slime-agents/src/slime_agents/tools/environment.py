"""`ToolEnvironment`: what answers a policy that calls tools, turn by turn."""

from __future__ import annotations

from slime_core.protocols import Environment, Observation, Tokenizer
from slime_core.protocols.turn import text_after
from slime_core.samples import Sample, Status

from slime_agents.formats.calls import ToolCall
from slime_agents.tape.messages import Message
from slime_agents.tape.reading import read_turn
from slime_agents.tape.template import ChatTemplate
from slime_agents.tools.toolbox import Toolbox


class ToolEnvironment(Environment):
    """Answers the calls of a turn, all at once; a turn without any is the last one.

    Args:
        toolbox: that is open.
        template: renders results, and says how calls are written.
        tokenizer: reads turns.
        ends: ids that end turns.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        ends: frozenset[int],
    ) -> None:
        self._toolbox, self._template, self._tokenizer, self._ends = toolbox, template, tokenizer, ends

    async def reset(self, sample: Sample) -> None:
        """Say nothing: the prompt has the tools."""

    async def step(self, sample: Sample, text: str) -> Observation:
        """Answer the calls of a turn, those that cannot be read too: by what is wrong with them."""
        ids = sample.response_tokens[sample.turn_begin :]
        last_id = ids[-1] if len(ids) and ids[-1] in self._ends else None
        said = ids if last_id is None else ids[:-1]
        # `text` may lack special tokens, which some models begin calls with.
        written = text_after([], said, self._tokenizer, skip_special_tokens=False)
        calls = read_turn(written, self._template.tool_format, self._toolbox.schemas).calls
        if sample.status is Status.TRUNCATED or not calls:
            return Observation(done=True)
        answers = await self._toolbox.answer(calls)
        results: list[Message] = [
            {
                "role": "tool",
                "content": one.text,
                "tool_call_id": f"call{i:05}",
                "name": getattr(call, "name", "unreadable"),
            }
            for i, (call, one) in enumerate(zip(calls, answers, strict=True))
        ]
        record = [
            {
                "tool": call.name if isinstance(call, ToolCall) else None,
                "result": one.text,
                "is_error": one.is_error,
            }
            for call, one in zip(calls, answers, strict=True)
        ]
        content = self._template.between(results, self._toolbox.schemas, last_id=last_id)
        return Observation(content=content, info={"calls": record})

    async def restore(self, sample: Sample, state: object) -> None:
        """Go on; there is nothing to restore."""

    async def close(self) -> None:
        """Nothing to do: the tools are of the run."""

    def state(self) -> dict[str, int]:
        """Return nothing to remember: every turn is answered by itself."""
        return {}
