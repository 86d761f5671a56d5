"""Checks that a reward returns the entries that settings read (`--reward-key`), by one call before the run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.files.json_text import shown
from slime_core.rewards.results import Reward
from slime_core.rewards.scorer import Scorer
from slime_core.rundir.served_models import wanted_models
from slime_core.samples import Sample, Status


async def check_reward_keys(
    settings: Settings, make_scorer: Callable[[], Scorer], prompts: Iterable[Sample]
) -> None:
    """Score one prompt's label as if it were the response, and see whether `reward_key` and `eval_reward_key` are there.

    Nothing is called where neither is given, where no prompt that a reward is asked about has a label, or where the run itself serves what the reward
    asks. A reward that fails tells nothing here.

    Raises:
        ConfigError: an entry is missing, or is no number.
    """
    section = settings.reward
    keys = {"reward_key": section.reward_key, "eval_reward_key": section.eval_reward_key}
    given = {name: key for name, key in keys.items() if key is not None}
    if not given or wanted_models(settings):
        return
    scorer = make_scorer()
    labelled = next((one for one in prompts if one.label is not None and scorer.asks(one)), None)
    if labelled is None:
        return
    sample = dataclasses.replace(
        labelled, index=0, group_index=0, response=labelled.label or "", status=Status.COMPLETED
    )
    try:
        await scorer.start()
        if section.group_rm:
            n = settings.rollout.n_samples_per_prompt
            result = (await scorer.score_group([dataclasses.replace(sample) for _ in range(n)]))[0]
        else:
            result = await scorer.score(sample)
    finally:
        await scorer.close()
    if isinstance(result, Reward) and (problems := list(_missing(given, result))):
        raise ConfigError(problems)


def _missing(keys: dict[str, str], result: Reward) -> Iterator[Problem]:
    value = result.value
    for name, key in keys.items():
        where = f"reward.{name}"
        if not isinstance(value, dict):
            todo = f"drop --{name.replace('_', '-')}"
            yield Problem(
                where, f"{key!r} of a reward that is the number {value}", "a reward that is a dict", todo
            )
        elif not isinstance(value.get(key), int | float):
            numbers = [entry for entry, number in value.items() if isinstance(number, int | float)]
            yield Problem(
                where,
                f"{key!r}, of which the reward makes {shown(value.get(key))}",
                f"one of {', '.join(numbers)}" if numbers else "a reward that has a number under it",
            )
