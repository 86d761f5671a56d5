"""Hooks of slime-algos: its section, the conventions of `--numerics`, and checks of settings without effect."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slime_core.config.sections import RewardSection
from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl

from slime_algos.section import AlgosSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.plugins.registry import Registry


WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that mean nothing without whitening."""
NEEDED = {
    "use_tis": (
        "tis_level",
        "tis_mode",
        "tis_clip_low",
        "tis_clip",
        "tis_batch_normalize",
        "tis_metric",
    ),
    "use_rs": ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
    "use_opsm": ("opsm_delta",),
    "use_opd": ("opd_kl_coef",),
    "use_kl_loss": ("kl_loss_coef", "use_unbiased_kl", "kl_straight_through"),
    "kl_target": ("kl_horizon",),
    "passk_std_normalization": ("passk_std_eps",),
}
"""Settings that are read only where the one that stands before them is on."""


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[algos]`; its flags carry no prefix, because the whole field uses these words."""
    return [Section("algos", AlgosSection, prefix="")]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse settings that would have no effect, or would have one twice."""
    section = settings.section(AlgosSection)
    if section.kl_coef != 0 and section.kl_loss_coef != 0:
        yield Problem(
            where="algos.kl_coef and algos.kl_loss_coef",
            found=f"{section.kl_coef} and {section.kl_loss_coef}",
            wanted="the KL divergence in the reward or in the loss, not in both",
        )
    yield from _check_switches(settings, section)
    yield from _check_reward_kl(settings, section)
    for names in (("tis_clip_low", "tis_clip"), ("rs_lower_bound", "rs_upper_bound")):
        low, high = (getattr(section, name) for name in names)
        if low > high:
            yield Problem(
                where=f"algos.{names[0]} and algos.{names[1]}",
                found=f"{low} and {high}",
                wanted="a lower bound that is not above the upper one",
            )
    algorithm = settings.algorithm
    chosen = _name(algorithm.custom_advantage_function_path or algorithm.advantage_estimator)
    if chosen in WHITENED and not section.normalize_advantages:
        yield Problem(
            where="algos.normalize_advantages",
            found=f"false with the estimator {chosen!r}, whose advantages may have any scale",
            wanted="true",
            todo="add --normalize-advantages",
        )
    yield from _check_clip(settings, section)
    if chosen == "gdpo":
        yield from _check_parts(settings.reward, section.gdpo_weights)
    yield from _check_corrections(settings, section)


@hookimpl
def slime_check_flags(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse options of estimators, losses, reducers and reward transforms that are not chosen."""
    from slime_algos.unread_flags import unread_flags  # imports numpy

    return unread_flags(settings, registry)


def _name(reference: str) -> str:
    """Return the name alone of what is ours: both forms choose it."""
    return reference.removeprefix("slime-algos/")


def _check_switches(settings: Settings, section: AlgosSection) -> Iterable[Problem]:
    """Refuse values of somebody's own that nothing reads; not where the switch was turned off on purpose, as in a run's own recipe."""
    for switch, names in NEEDED.items():
        if getattr(section, switch) or settings.origin("algos", switch) != "default":
            continue
        if switch == "use_tis" and settings.algorithm.custom_tis_function_path is not None:
            continue  # it reads what it likes
        for name in names:
            value, origin = getattr(section, name), settings.origin("algos", name)
            if value == AlgosSection.model_fields[name].default or origin.startswith("numerics "):
                continue
            flag = switch.replace("_", "-")
            yield Problem(
                where=f"algos.{name}",
                found=f"{value} without {switch}, so it has no effect",
                wanted=f"{switch}, or no {name}",
                todo=f"add --{flag}" + (" 0.1" if switch == "kl_target" else ""),
            )


def _check_clip(settings: Settings, section: AlgosSection) -> Iterable[Problem]:
    """Refuse PPO's bound, unless somebody asked for it, where a sample's mean ratio would never reach it."""
    algorithm = settings.algorithm
    named = algorithm.custom_loss_function_path or algorithm.loss_type
    loss = named or f"{algorithm.custom_advantage_function_path or algorithm.advantage_estimator}_loss"
    origin = settings.origin("algos", "eps_clip")
    if _name(loss) == "gspo_loss" and (origin == "default" or origin.startswith("numerics ")):
        yield Problem(
            where="algos.eps_clip",
            found=f"{section.eps_clip:g} ({origin}) with gspo_loss, none of whose ratios it clips",
            wanted="a bound for the mean ratio of a sample",
            todo="add the paper's: --eps-clip 3e-4 --eps-clip-high 4e-4",
        )


def _check_reward_kl(settings: Settings, section: AlgosSection) -> Iterable[Problem]:
    """Refuse the estimator of another framework's KL loss in the reward, and an adaptive coefficient that would not work."""
    origin = settings.origin("algos", "kl_loss_type")
    if section.kl_coef != 0 and section.kl_loss_type != "k1" and origin.startswith("numerics "):
        yield Problem(
            where="algos.kl_loss_type",
            found=f"{section.kl_loss_type} ({origin}), which is for a KL loss, with kl_coef = {section.kl_coef:g}",
            wanted="an estimator for the reward",
            todo="add --kl-loss-type k1, as verl and TRL have it",
        )
    if section.kl_target is None:
        return
    if section.kl_coef == 0:
        yield Problem(
            where="algos.kl_target",
            found=f"{section.kl_target:g} with kl_coef = 0, which no factor changes",
            wanted="the coefficient to begin with",
            todo="add --kl-coef 0.05",
        )
    rollout = settings.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if section.kl_horizon < samples:
        yield Problem(
            where="algos.kl_horizon",
            found=f"{section.kl_horizon:g} with {samples} samples a step, so that kl_coef would swing",
            wanted="at least the samples of a step",
        )


def _check_corrections(settings: Settings, section: AlgosSection) -> Iterable[Problem]:
    """Refuse what corrects π_old against the engine's policy where the two are the same, and rejection by two at once."""
    has_own = settings.algorithm.custom_tis_function_path is not None
    chosen = {
        "algos.use_tis": section.use_tis,
        "algos.use_rs": section.use_rs,
        "algorithm.custom_tis_function_path": has_own,
    }
    if settings.train.use_rollout_logprobs and any(chosen.values()):
        yield Problem(
            where=" and ".join(name for name, is_on in chosen.items() if is_on),
            found="a correction of π_old against the engine's policy with train.use_rollout_logprobs, "
            "which makes them the same",
            wanted="one of them",
        )
    for name, rejects in (
        ("use_rs", section.use_rs),
        ("max_token_staleness", section.max_token_staleness is not None),
    ):
        if has_own and rejects:
            yield Problem(
                where=f"algos.{name}",
                found="it beside algorithm.custom_tis_function_path",
                wanted="one of the two: both say which tokens are rejected",
            )


def _check_parts(reward: RewardSection, weights: Mapping[str, float]) -> Iterable[Problem]:
    several = reward.rm_weights if len(reward.rm_weights) > 1 else {}
    if not weights:
        found = f" --gdpo-weights '{json.dumps(several)}'" if several else " --gdpo-weights '{\"acc\": 1.0}'"
        yield Problem(
            where="algos.gdpo_weights",
            found="nothing with the estimator 'gdpo'",
            wanted="parts of the reward, and the weight of each",
            todo=f"add{found}",
        )
    for part in weights:
        if several and part not in several and part != "score":
            near = difflib.get_close_matches(part, several, n=1)
            yield Problem(
                where="algos.gdpo_weights",
                found=f"the part {part!r}",
                wanted=f"one of the rewards of rm_weights: {', '.join(several)}",
                todo=f"did you mean {near[0]!r}?" if near else "",
            )
    if reward.overlong_buffer_len is not None:
        yield Problem(
            where="reward.overlong_buffer_len",
            found=f"{reward.overlong_buffer_len} with the estimator 'gdpo', which reads parts of the reward, not the score",
            wanted="nothing; or a part that falls with the length",
        )
