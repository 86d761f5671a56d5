"""The generator `roles`: one prompt fans out into roles, such as solver and checker, which share a `rollout_id`."""

from __future__ import annotations

from typing import Any

from slime_core.config.functions import Resolve
from slime_core.protocols import GenerateContext, SamplingParams, end_ids
from slime_core.protocols.rollout import rendering_prompt
from slime_core.protocols.turn import text_after
from slime_core.rollout.generators.dialogue import MAX_CONTEXT
from slime_core.rollout.group import reset
from slime_core.runtime.replaced import replaced
from slime_core.samples import Sample, Status

from slime_agents.roles.table import AgentRole, read_roles
from slime_agents.section import AgentsSection
from slime_agents.tape.reading import read_turn
from slime_agents.templates import Templates
from slime_agents.tools.loop import opening_messages, without_room

#: Key of `Sample.metadata` under which a sample says which role it is of, and what all roles said.
ROLES = "roles"


@rendering_prompt
class Roles:
    """Lets roles speak one after the other about a prompt; each becomes a sample, and all of them share a `rollout_id`.

    A role's `prompt` is what it is asked: text in which `{task}` is the prompt of the sample, and `{NAME}` what the role of that name
    said. Its `reward` is the name of the reward that scores it (`slime.rewards`); the run's own where it has none. All roles are the
    policy, or some of it: a role with `train = false` is heard and not trained on. `metadata["roles"]` has the role of a sample and
    what each role said.

    What roles said may fill the context: where it leaves a later one no token to say, the roles before it are returned, the last of
    them TRUNCATED, and `metadata["roles"]` has `ended_by` (`max_context_len`) and `not_reached`, the roles that did not speak. Where the
    first one has no room, the sample fails.
    """

    def __init__(self, *, settings: AgentsSection, resolve: Resolve) -> None:
        self._roles: list[AgentRole] = read_roles(settings.roles)
        self._system_prompt = settings.system_prompt
        self._templates = Templates(settings, resolve)

    async def __call__(
        self, ctx: GenerateContext, sample: Sample, params: SamplingParams
    ) -> Sample | list[Sample]:
        """Generate the samples of the roles; an aborted one returns its prompt alone, and no response of any role."""
        template = self._templates.of(ctx.tokenizer, sample.apply_chat_template_kwargs)
        task = opening_messages(sample, None)[-1]["content"]
        said: dict[str, str] = {}
        made: list[Sample] = []
        for number, role in enumerate(self._roles):
            opening = template.opening(self._messages(role, role.asked(task, said)))
            if ctx.max_context_len is not None and len(opening) >= ctx.max_context_len:
                if not made:
                    return without_room(sample, len(opening), ctx.max_context_len)
                made[-1].status = Status.TRUNCATED
                break
            one = reset(sample)
            one.tokens, one.session_id, one.rollout_id = opening, sample.session_id, sample.index
            # Roles whose prompts are of one length are not to draw the same numbers.
            seed = None if params.seed is None else params.seed + (number << 32)
            await ctx.turn(one, replaced(params, seed=seed))
            if one.status is Status.ABORTED:
                sample.status = Status.ABORTED
                return sample
            ids = list(one.response_tokens)
            ended = bool(ids) and ids[-1] in end_ids(ctx.tokenizer, params.stop_token_ids)
            text = text_after([], ids[:-1] if ended else ids, ctx.tokenizer, skip_special_tokens=True)
            said[role.name] = read_turn(text, None).text.strip()
            if role.reward is not None:
                one.custom_rm_path = role.reward
            if not role.train:
                one.loss_mask = [0] * one.response_length
            made.append(one)
        record: dict[str, Any] = {"said": said}
        if missing := [role.name for role in self._roles[len(made) :]]:
            record |= {"ended_by": MAX_CONTEXT, "not_reached": missing}
        for role, one in zip(self._roles, made, strict=False):
            one.metadata = {**sample.metadata, ROLES: {"role": role.name, **record}}
        return made if len(made) > 1 else made[0]

    def _messages(self, role: AgentRole, asked: str) -> list[dict[str, Any]]:
        """Return what a role hears."""
        system = self._system_prompt if role.system_prompt is None else role.system_prompt
        messages = [{"role": "user", "content": asked}]
        return messages if system is None else [{"role": "system", "content": system}, *messages]
