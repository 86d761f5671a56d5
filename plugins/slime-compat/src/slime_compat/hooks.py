"""Hooks of slime-compat: functions, arguments and files that were written for the reference system. Imports neither torch nor megatron."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.derive import num_ranks
from slime_core.config.factories import trainer_factory
from slime_core.config.functions import run_args
from slime_core.config.parsing.schema import build_schema
from slime_core.config.parsing.translation import Translation
from slime_core.files.strict_read import read_text
from slime_core.plugins.adapter import Adapter
from slime_core.plugins.hooks import Section, hookimpl

from slime_compat.adapters.table import adapter_of
from slime_compat.launch.section import CompatSection
from slime_compat.launch.translate import translate

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext
    from slime_core.errors import Problem
    from slime_core.plugins.registry import Registry
    from slime_core.run.run import Run
    from slime_core.samples import Group


@hookimpl
def slime_adapt_plugin(group: str, flag: str | None, reference: str, value: Any) -> Adapter | None:
    """Return the adapter of a function with the reference system's signature."""
    return adapter_of(group, flag, reference, value)


@hookimpl
def slime_read_file(path: Path) -> Any:
    """Read YAML; a file with nothing in it is an empty table.

    Raises:
        ValueError: it is none, or has a key twice in one table; says where.
    """
    if path.suffix not in (".yaml", ".yml"):
        return None
    import yaml

    text = read_text(path).removeprefix("\ufeff")
    try:
        _refuse_keys_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if value is None else value


def _refuse_keys_twice(root: Any) -> None:
    """Raise ValueError where a table of a YAML document has a key twice, of which PyYAML would keep the last.

    Args:
        root: its node; None of an empty document.
    """
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        keys = [key for key, _ in node.value if isinstance(key.value, str)] if node.id == "mapping" else []
        for key, count in Counter((key.tag, key.value) for key in keys).items():
            if count > 1:
                raise ValueError(
                    f"the key {key[1]!r} twice in one table, which begins in line {node.start_mark.line + 1}"
                )
        waiting += [one for entry in node.value for one in (entry if isinstance(entry, tuple) else [entry])]


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `compat`."""
    return [Section("compat", CompatSection, read_by=None)]


@hookimpl
def slime_translate(words: Sequence[str], registry: Registry) -> Translation | None:
    """Return what the arguments of the reference's launch scripts mean here."""
    return translate(words, build_schema(registry))


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Hold arguments that describe the model that is trained against its config.json."""
    given = build.section(CompatSection).model_args
    if not given or not trainer_factory(build.settings.train, build.registry).capabilities.learns:
        return
    from slime_compat.launch.folders import config_of
    from slime_compat.launch.model_args import contradictions

    config = config_of(build.model_path)
    name = build.settings.model.model_name or str(config.get("model_type", ""))
    yield from contradictions(given, build.registry.resolve("slime.models", name).architecture(config))


@hookimpl
def slime_rollout_end(run: Run, step: int, groups: Sequence[Group]) -> None:
    """Write the dump of a step, and report metrics, where they are asked for."""
    from slime_compat.launch.reference_metrics import categories, column_means, generation_speeds
    from slime_compat.views.running.namespace import Args

    section = run.settings.section(CompatSection)
    if section.save_debug_rollout_data is not None:
        from slime_compat.launch.dumps import write_dump

        write_dump(section.save_debug_rollout_data, step, groups)
    if section.reference_metrics:
        run.add_learned(column_means(groups))
        gpus = Args(run_args(run.settings)).rollout_num_gpus
        run.add_learned(generation_speeds(groups, rollout_s=run.learned["perf/rollout_time"], gpus=gpus))
    if section.log_reward_category is not None:
        run.add_learned(categories(groups, section.log_reward_category))


@hookimpl
def slime_step_metrics(run: Run, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return the metrics under the reference system's names, where they are asked for."""
    if not run.settings.section(CompatSection).reference_metrics:
        return {}
    from slime_compat.launch.reference_metrics import step_metrics

    return step_metrics(
        metrics,
        step=step,
        optimizer_steps=run.sizes.num_steps_per_rollout,
        global_batch_size=run.sizes.global_batch_size,
        ranks=num_ranks(run.settings),
    )
