"""`unread_flags`: options given as flags that no chosen estimator, loss, reducer or reward transform takes, and flags of a critic's loss
where there is no critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.checks.unread_flags import unread_without
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.bind import options_of
from slime_core.protocols import needs_of
from slime_core.rewards.transforms import group_norm

from slime_algos.section import AlgosSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.plugins.registry import Registry
    from slime_core.run.assemble import Algorithm


#: Settings of core's that are options of its reward transform.
_OF_TRANSFORMS = ("disable_grpo_std_normalization", "std_ddof", "std_eps", "std_over_batch", "leave_one_out")
#: Settings of core's that are the critic's loss and its options, and what has a critic.
_OF_CRITICS = ("value_loss_type", "value_loss_args")
_CRITIC = "--advantage-estimator ppo, or another that reads values"


def unread_flags(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield the flags of `[algos]`, of reward transforms and of the critic's loss, whose values differ from the defaults and reach no function.

    Imports what is chosen, torch with it, only where there is such a flag.
    """
    of_transforms = unread_without(settings, "algorithm", _OF_TRANSFORMS, wanted="")
    flags = [*unread_without(settings, "algos", AlgosSection.model_fields, wanted=""), *of_transforms]
    of_critics = [*unread_without(settings, "algorithm", _OF_CRITICS, wanted=_CRITIC)]
    if not flags and not of_critics:
        return
    from slime_core.run.assemble import algorithm

    try:
        made = algorithm(settings, registry)
        read = _read(made, settings, registry)
    except (ConfigError, PluginError):  # each is told by checks of its own
        return
    if made.value_loss is None:
        yield from of_critics
    if read is None:
        return
    for problem in flags:
        name = problem.where.partition(".")[2]
        if name not in read:
            yield dataclasses.replace(problem, wanted=_readers(name, registry) + problem.wanted)


def _read(made: Algorithm, settings: Settings, registry: Registry) -> set[str] | None:
    """Return the options that chosen functions are given from `[algos]`; None where that cannot be known."""
    read: set[str] = set()
    for function in (made.estimator, made.loss, made.value_loss, made.reducer):
        read.update(getattr(function, "keywords", {}))
    transform = settings.reward.custom_reward_post_process_path or made.reward_transform
    read.update(options_of(registry.resolve("slime.reward_transforms", transform)))
    return None if "resolve" in read else read


def _readers(name: str, registry: Registry) -> str:
    """Return the flags after which an option would be read, each with the functions that it may name."""
    estimators, losses, reducers, transforms = (
        {
            p.name: registry.load(p)
            for p in registry.plugins(f"slime.{group}")
            if p.distribution == "slime-algos"
        }
        for group in ("advantages", "losses", "reducers", "reward_transforms")
    )
    transforms |= {"group-norm": group_norm}
    of_values = options_of(losses.pop("value_loss"))

    def is_read_with(estimator: Any) -> bool:
        brought = options_of(transforms[t]) if (t := estimator.reward_transform) in transforms else {}
        values = of_values if "values" in needs_of(estimator, {}) else {}
        return name in options_of(estimator) or name in brought or name in values

    by_flag = {
        "--advantage-estimator": [own for own, estimator in estimators.items() if is_read_with(estimator)],
        "--loss-type": [own for own, loss in losses.items() if name in options_of(loss)],
        "--loss-reducer": [own for own, reducer in reducers.items() if name in options_of(reducer)],
    }
    return ", or ".join(f"{flag} {' or '.join(sorted(names))}" for flag, names in by_flag.items() if names)
