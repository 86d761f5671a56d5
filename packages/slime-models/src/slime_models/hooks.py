"""Hooks of slime-models: finding models by name, and checking a run's model folder."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.derive import is_local
from slime_core.config.factories import trainer_factory
from slime_core.errors import CheckpointError, DataError, PluginError, Problem
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.own_name import means

from slime_models.family.chosen import family_of_config
from slime_models.hf.config import has_weights, read_config

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext

    from slime_models.family.family import ModelFamily

#: The engine that reads a folder by our families, whether or not it is trained.
_BY_FAMILY = "slime-torch/torch"


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of what reads models and tokenizers."""
    needed = ("torch", "transformers", "safetensors")
    versions = {name: _version(name) or "not installed; slime-models needs it" for name in needed}
    return versions | {"gguf": _version("gguf") or "not installed; `slime-models[smollm2]` brings it"}


@hookimpl
def slime_check_build(build: BuildContext) -> list[Problem]:
    """Return that the engine does not serve the model's family, and where weights are not those that config.json describes.

    Where nothing is trained no weights are sent, and an engine that reads folders by itself judges them by itself.
    """
    learns = _learns(build)
    found = list(_engine_problems(build, learns=learns))
    if learns or means(build.settings.rollout.rollout_engine, _BY_FAMILY):
        found += _weight_problems(build)
    return found


def _learns(build: BuildContext) -> bool:
    try:
        return trainer_factory(build.settings.train, build.registry).capabilities.learns
    except PluginError:  # which core says
        return True


def _engine_problems(build: BuildContext, *, learns: bool) -> Iterator[Problem]:
    engine = build.settings.rollout.rollout_engine
    try:
        family = _family(build, read_config(build.model_path))
    except (DataError, PluginError):
        return  # no family of ours: whoever needs one says so
    name = engine.rpartition("/")[2]
    why = family.not_served.get(name)
    if why is None and learns:
        why = family.not_updated.get(name)
    if why is None and name in family.not_served_on_cpu and _is_on_cpu(build):
        why = family.not_served_on_cpu[name]
    if why is not None:
        yield Problem(
            "rollout.rollout_engine",
            f"{engine} with {build.model_path}, a {family.model_type} model",
            "an engine that serves it",
            why,
        )


def _family(build: BuildContext, config: Mapping[str, Any]) -> ModelFamily:
    """Return the family that `model_name` names, or that config.json does; raises PluginError where none of ours is meant."""
    return family_of_config(build.registry, config, build.model_path, named=build.settings.model.model_name)


def _is_on_cpu(build: BuildContext) -> bool:
    """Return whether an engine would compute on the CPU of this machine. What machines of a launcher have is known at the start."""
    if not is_local(build.settings.run):
        return False
    import torch

    return not torch.cuda.is_available()


def _weight_problems(build: BuildContext) -> list[Problem]:
    folder = build.model_path
    if not has_weights(folder) and not any(folder.glob("model*.safetensors")):
        return []  # who needs them says so
    from slime_models.quantization.reading import open_weights

    try:
        config = read_config(folder)
        family = _family(build, config)
        family.check_weights(open_weights(folder, stacked=family.stacked), family.architecture(config))
    except PluginError:
        return []  # no family of ours: whoever needs one says so
    except (CheckpointError, DataError) as error:
        return [
            Problem("model.hf_checkpoint", f"{folder}: {error}", "weights that its config.json describes")
        ]
    return []


@hookimpl
def slime_resolve_model(name: str) -> Path | None:
    """Return the folder of a known model or of a hub name (`owner/name`), fetched if need be."""
    from slime_models.hf import fetch

    return fetch.resolve(name) if name in fetch.KNOWN or fetch.is_hub_name(name) else None


@hookimpl
def slime_list_models() -> Iterable[tuple[str, str]]:
    """Return the models that have a short name."""
    from slime_models.hf import fetch

    return [(model.name, f"{model.summary}; {model.licence}") for model in fetch.list_models()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
