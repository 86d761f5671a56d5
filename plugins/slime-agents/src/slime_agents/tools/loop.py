"""The generator `tool-loop`: the policy calls tools until a turn calls none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.functions import Resolve
from slime_core.config.sections import EnvironmentSection
from slime_core.protocols import GenerateContext, SamplingParams, end_ids
from slime_core.protocols.rollout import rendering_prompt
from slime_core.rollout.generators.multi_turn import converse
from slime_core.samples import Sample, Status

from slime_agents.section import AgentsSection
from slime_agents.tape.messages import Message, normal
from slime_agents.templates import Templates
from slime_agents.tools.environment import ToolEnvironment
from slime_agents.tools.tool import SPARE_S, ToolLimits
from slime_agents.tools.toolbox import build_toolbox

logger = logging.getLogger(__name__)

#: Seconds that answering a turn may take beyond the longest deadline of a tool.
_SPARE_S = SPARE_S + 5.0


@rendering_prompt
class ToolLoop:
    """Lets the policy call tools, and answers each turn that does, until one does not.

    The prompt is chat messages, or text, which counts as one of the user; it is rendered here, with the tools, so
    `--apply-chat-template` stays off. Calls of a turn are answered at once, beside each other. What goes wrong, from a call that is no
    JSON to a tool that hangs, is text that the model reads. The policy's tokens are trained on, those of the tools are not.
    `metadata["multi_turn"]` has every call.
    """

    def __init__(self, *, settings: AgentsSection, resolve: Resolve) -> None:
        limits = ToolLimits(timeout_s=settings.tool_timeout_s, max_chars=settings.max_tool_chars)
        self._toolbox = build_toolbox(
            settings.tools, resolve, limits=limits, max_calls=settings.max_calls_per_turn
        )
        self._settings = settings
        for i, one in enumerate(settings.examples):
            normal(one, f"agents.examples[{i}]")  # refused here, and not with the first sample
        longest = max(
            [limits.timeout_s, *(float(one.get("timeout_s", 0)) for one in settings.tools.values())]
        )
        self._budgets = EnvironmentSection(
            max_turns=settings.max_turns,
            max_environment_tokens=settings.max_tool_tokens,
            environment_timeout_s=longest + _SPARE_S,
        )
        self._templates = Templates(settings, resolve)

    async def __call__(
        self, ctx: GenerateContext, sample: Sample, params: SamplingParams
    ) -> Sample | list[Sample]:
        """Generate one sample; it fails where its prompt leaves no room for an answer.

        Raises:
            DataError: the chat template refuses the messages.
            PluginError: a tool is not to be had.
        """
        await self._toolbox.open()
        template = self._templates.of(ctx.tokenizer, sample.apply_chat_template_kwargs)
        if not sample.response_length:
            opening = template.opening(
                opening_messages(sample, self._settings.system_prompt, self._settings.examples),
                self._toolbox.schemas,
            )
            if ctx.max_context_len is not None and len(opening) >= ctx.max_context_len:
                return without_room(sample, len(opening), ctx.max_context_len)
            sample.tokens = opening
        ends = end_ids(ctx.tokenizer, params.stop_token_ids)

        def create(_: Sample) -> ToolEnvironment:
            return ToolEnvironment(self._toolbox, template, ctx.tokenizer, ends=ends)

        return await converse(ctx, sample, params, settings=self._budgets, name="tool-loop", create=create)

    async def close(self) -> None:
        """Close the tools."""
        await self._toolbox.close()


def opening_messages(
    sample: Sample, system_prompt: str | None, examples: Sequence[Mapping[str, Any]] = ()
) -> list[Message]:
    """Return the messages that a sample's prompt is, after examples and, where it has none of its own, a system prompt.

    Raises:
        DataError: a message is none.
    """
    prompt = sample.prompt
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [normal(message, f"{sample.name}: message {i}") for i, message in enumerate(given)]
    n_system = int(bool(messages) and messages[0]["role"] == "system")
    messages[n_system:n_system] = [normal(one, f"agents.examples[{i}]") for i, one in enumerate(examples)]
    if system_prompt is not None and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def without_room(sample: Sample, n_tokens: int, most: int) -> Sample:
    """Return a sample as failed, since its prompt leaves no token for an answer: a long row ends no run, and drops its group.

    Args:
        sample: whose prompt is only rendered here, so that `--rollout-max-prompt-len` did not see its length.
        n_tokens: of its prompt.
        most: tokens of prompt and answer.
    """
    told = f"its prompt has {n_tokens} tokens, of at most {most} with the answer"
    sample.status = Status.FAILED
    sample.failure = f"{sample.name}: {told}; raise the bound on the context, or leave such rows out"
    logger.warning("%s", sample.failure)
    return sample
