"""Checks between settings, the model and the chosen plugins, which are imported for that. They return problems."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.build import BuildContext
from slime_core.config.derive import num_ranks, pool_setting, sends_images
from slime_core.config.eval_sets import eval_sets
from slime_core.config.factories import engine_factory, trainer_factory
from slime_core.errors import Problem


def check_build(build: BuildContext) -> list[Problem]:
    """Return what is wrong between settings, model and chosen plugins; imports the plugins, and builds nothing."""
    problems: list[Problem] = []
    backend, n = build.settings.train.train_backend, num_ranks(build.settings)
    trainer = trainer_factory(build.settings.train, build.registry).capabilities
    if n > 1 and not trainer.ranked:
        problems.append(
            Problem(
                "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node",
                f"{n} with the trainer {backend!r}",
                "1: this trainer is one process",
            )
        )
    problems += [
        Problem(
            pool_setting(role),
            f"{num_ranks(build.settings, role)} with the trainer {backend!r}",
            f"neither: this trainer has no {role} that could be apart",
        )
        for role in build.settings.cluster.pools
        if role not in trainer.pools
    ]
    if build.settings.checkpoint.async_save and not trainer.background_save:
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
    problems += _concurrency(build)
    problems += _context(build)
    problems += _stop_ids(build)
    for answer in build.registry.hooks.slime_check_build(build=build):
        problems += answer
    return list(dict.fromkeys(problems))  # engine and trainer may miss the same


def context_limit(build: BuildContext) -> int | None:
    """Return the most tokens of prompt and response that the engine takes; None where it does not say."""
    return engine_factory(build.settings.rollout, build.registry).context_limit(build)


def _context(build: BuildContext) -> Iterator[Problem]:
    """Refuse responses that the engine's context has no room for."""
    limit = context_limit(build)
    if limit is None:
        return
    rollout, evaluation = build.settings.rollout, build.settings.eval
    context, longest = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    for where, length, most in (
        ("rollout.rollout_max_context_len", context, limit),
        ("rollout.rollout_max_response_len", longest if context is None else None, limit - 1),
        ("eval.eval_max_context_len", evaluation.eval_max_context_len, limit),
        (
            "eval.eval_max_response_len",
            evaluation.eval_max_response_len if evaluation.eval_max_context_len is None else None,
            limit - 1,
        ),
    ):
        if length is not None and length > most:
            found = f"{length} with a context of {limit} tokens (the model's, or the engine's own limit)"
            yield Problem(where, found, f"at most {most}")


def _stop_ids(build: BuildContext) -> Iterator[Problem]:
    """Refuse ids that are no token of the model."""
    given = {"rollout.rollout_stop_token_ids": build.settings.rollout.rollout_stop_token_ids}
    if build.settings.eval.eval_interval is not None:
        for name, own in eval_sets(build.settings, build.registry).items():
            where = f"eval.eval_config ({build.settings.eval.eval_config}): {name}.stop_token_ids"
            given[where] = own.stop_token_ids or []
    size = build.vocab_size if any(given.values()) else None
    if size is None:
        return
    for where, tokens in given.items():
        for token in tokens:
            if token >= size:
                yield Problem(where, str(token), f"ids of the vocabulary: 0 to {size - 1}")


def _engine_needs(build: BuildContext) -> Iterator[Problem]:
    needs = build.engine_needs
    if not needs:
        return
    engine = build.settings.rollout.rollout_engine
    offered = engine_factory(build.settings.rollout, build.registry).capabilities.completions
    if missing := sorted(needs - offered):
        yield Problem(
            "rollout.rollout_engine",
            f"{engine}, whose completions have no {', '.join(missing)}",
            "an engine that offers what the run needs",
            "the trainer's settings ask for it",
        )


def _concurrency(build: BuildContext) -> Iterator[Problem]:
    """Refuse to follow the load of an engine that does not report it."""
    rollout = build.settings.rollout
    if rollout.rollout_concurrency != "auto":
        return
    if not engine_factory(rollout, build.registry).capabilities.reports_load:
        yield Problem(
            "rollout.rollout_concurrency",
            f"auto with the engine {rollout.rollout_engine!r}, which does not report its load",
            "an engine that does, or a number",
            "--rollout-concurrency 64, for example, or --rollout-engine sglang",
        )


def _images(build: BuildContext) -> Iterator[Problem]:
    """Refuse an engine that takes no images, where they are to go to it."""
    rollout = build.settings.rollout
    if not sends_images(build.settings):
        return
    if not engine_factory(rollout, build.registry).capabilities.images:
        yield Problem(
            "rollout.rollout_engine",
            f"{rollout.rollout_engine}, which takes no images, with data.multimodal_keys",
            "an engine that does",
            "--rollout-engine sglang does",
        )
