"""The generator `multi-turn`: the policy and an environment take turns in one response."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import field_validator

from slime_core.config.functions import Resolve
from slime_core.config.sections import EnvironmentSection
from slime_core.errors import EnvironmentFailure
from slime_core.protocols import MULTI_TURN, Environment, GenerateContext, SamplingParams
from slime_core.rollout.generators.dialogue import Dialogue
from slime_core.rollout.group import reset
from slime_core.samples import Sample


class MultiTurnSettings(EnvironmentSection):
    """Options of `multi-turn`: the settings of the environment, which must be chosen."""

    @field_validator("environment")
    @classmethod
    def _is_chosen(cls, value: str | None) -> str | None:
        if value is None:
            raise ValueError("the name of an environment, or module:factory; give --environment")
        return value


async def multi_turn(
    ctx: GenerateContext,
    sample: Sample,
    params: SamplingParams,
    *,
    settings: MultiTurnSettings,
    resolve: Resolve,
) -> Sample | list[Sample]:
    """Let the policy and an environment take turns until the environment is done or a budget is spent.

    The policy's tokens are trained on, those of the environment are not. `max_new_tokens` bounds the tokens of all turns of the
    policy, `max_environment_tokens` those of the environment, `rollout_max_context_len` all; a conversation that reaches a
    bound, or `max_turns`, is TRUNCATED. `metadata["multi_turn"]` says how many turns there were and what ended them.

    An aborted conversation goes on from the environment's `state()`; without one it begins anew.

    Raises:
        EnvironmentFailure: the environment raised, hung, or answered something unusable; names it and the sample.
    """
    return await converse(
        ctx,
        sample,
        params,
        settings=settings,
        name=str(settings.environment),
        create=lambda one: _built(one, settings, resolve),
    )


async def converse(
    ctx: GenerateContext,
    sample: Sample,
    params: SamplingParams,
    *,
    settings: EnvironmentSection,
    name: str,
    create: Callable[[Sample], Environment],
) -> Sample | list[Sample]:
    """Let the policy and an environment take turns; what `multi-turn` does, for generators with an environment of their own.

    Args:
        ctx: of the generator.
        sample: pending, or aborted.
        params: of the whole response.
        settings: budgets and the deadline of the environment.
        name: how messages call the environment.
        create: makes the environment of a sample.

    Raises:
        EnvironmentFailure: the environment raised, hung, or answered something unusable; names it and the sample.
    """
    record = sample.metadata.get(MULTI_TURN) if sample.response_length else None
    if sample.response_length and (record is None or record.get("state") is None):
        record, sample = None, _anew(sample)
    dialogue = Dialogue(
        ctx=ctx,
        sample=sample,
        params=params,
        settings=settings,
        name=name,
        environment=create(sample),
    )
    try:
        await dialogue.play(record)
    except BaseException as error:
        try:
            await dialogue.close()
        except EnvironmentFailure as second:
            error.add_note(str(second))
        raise
    await dialogue.close()
    if not dialogue.siblings:
        return sample
    together = [sample, *dialogue.siblings]
    for one in together:
        one.rollout_id = sample.index
    return together


def _anew(sample: Sample) -> Sample:
    """Return the sample as if it had never been generated, in the session that it has."""
    fresh = reset(sample)
    fresh.session_id = sample.session_id
    fresh.metadata.pop(MULTI_TURN, None)
    return fresh


def _built(sample: Sample, settings: MultiTurnSettings, resolve: Resolve) -> Environment:
    name = str(settings.environment)
    create = resolve(
        "slime.environments",
        name,
        where="environment.environment_args",
        explicit=settings.environment_args,
    )
    try:
        built: Environment = create()
    except BaseException as error:
        told = f"cannot be built: {type(error).__name__}: {error}"
        raise EnvironmentFailure(f"{sample.name}: the environment {name} {told}") from error
    return built
