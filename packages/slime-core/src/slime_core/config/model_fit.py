"""Checks between settings, the model and the chosen plugins, which are imported for that. They return problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime_core.build import BuildContext
from slime_core.config.derive import num_ranks, sends_images
from slime_core.config.sections import CheckpointSection, EvalSection, RolloutSection, TrainSection
from slime_core.errors import Problem


def check_build(build: BuildContext) -> list[Problem]:
    """Return what is wrong between settings, model and chosen plugins; imports the plugins, and builds nothing."""
    problems: list[Problem] = []
    backend, n = build.section(TrainSection).train_backend, num_ranks(build.settings)
    factory = build.registry.resolve("slime.trainers", backend)
    if n > 1 and not getattr(factory, "ranked", False):
        problems.append(
            Problem(
                "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node",
                f"{n} with the trainer {backend!r}",
                "1: this trainer is one process",
            )
        )
    if build.section(CheckpointSection).async_save and not getattr(factory, "saves_in_background", False):
        problems.append(
            Problem(
                "checkpoint.async_save",
                f"it with the trainer {backend!r}",
                "a trainer that trains on while it writes",
                "drop --async-save",
            )
        )
    problems += _engine_needs(build)
    problems += _images(build)
    problems += _context(build)
    problems += _stop_ids(build)
    for answer in build.registry.hooks.slime_check_build(build=build):
        problems += answer
    return problems


def context_limit(build: BuildContext) -> int | None:
    """Return the most tokens of prompt and response that the engine takes; None where it does not say."""
    factory = build.registry.resolve("slime.engines", build.section(RolloutSection).rollout_engine)
    limit: Callable[[BuildContext], int | None] = getattr(factory, "context_limit", lambda build: None)
    return limit(build)


def _context(build: BuildContext) -> Iterator[Problem]:
    """Refuse responses that the engine's context has no room for."""
    limit = context_limit(build)
    if limit is None:
        return
    rollout, evaluation = build.section(RolloutSection), build.section(EvalSection)
    context, longest = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    for where, length, most in (
        ("rollout.rollout_max_context_len", context, limit),
        ("rollout.rollout_max_response_len", longest if context is None else None, limit - 1),
        ("eval.eval_max_response_len", evaluation.eval_max_response_len, limit - 1),
    ):
        if length is not None and length > most:
            found = f"{length} with a context of {limit} tokens (the model's, or the engine's own limit)"
            yield Problem(where, found, f"at most {most}")


def _stop_ids(build: BuildContext) -> Iterator[Problem]:
    """Refuse ids that are no token of the model."""
    size = build.vocab_size
    if size is None:
        return
    for token in build.section(RolloutSection).rollout_stop_token_ids:
        if token >= size:
            yield Problem(
                "rollout.rollout_stop_token_ids", str(token), f"ids of the vocabulary: 0 to {size - 1}"
            )


def _engine_needs(build: BuildContext) -> Iterator[Problem]:
    needs = build.engine_needs
    if not needs:
        return
    engine = build.section(RolloutSection).rollout_engine
    factory = build.registry.resolve("slime.engines", engine)
    offers: frozenset[str] = getattr(factory, "offers", frozenset())
    if missing := sorted(needs - offers):
        yield Problem(
            "rollout.rollout_engine",
            f"{engine}, whose completions have no {', '.join(missing)}",
            "an engine that offers what the run needs",
            "the trainer's settings ask for it",
        )


def _images(build: BuildContext) -> Iterator[Problem]:
    """Refuse an engine that takes no images, where they are to go to it."""
    rollout = build.section(RolloutSection)
    if not sends_images(build.settings):
        return
    factory = build.registry.resolve("slime.engines", rollout.rollout_engine)
    if not getattr(factory, "sees_images", False):
        yield Problem(
            "rollout.rollout_engine",
            f"{rollout.rollout_engine}, which takes no images, with data.multimodal_keys",
            "an engine that does",
            "--rollout-engine sglang does",
        )
