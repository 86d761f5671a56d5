"""`family_of_config`: the family of a model, by the model_type in its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry

if TYPE_CHECKING:
    from slime_models.family.family import ModelFamily


def family_of_config(
    registry: Registry, config: Mapping[str, Any], folder: Path, *, named: str | None = None
) -> ModelFamily:
    """Return the family of a model.

    Args:
        registry: of what is installed.
        config: the parsed config.json.
        folder: where it is.
        named: `model_name`, by which the family is found in the place of the file's `model_type`. Whether it reads that file its
            `architecture` says: families of this package refuse every `model_type` but their own.

    Raises:
        PluginError: no installed family has that model_type; names the nearest, and says how to add one.
    """
    name = named or str(config.get("model_type", ""))
    installed = [plugin.name for plugin in registry.plugins("slime.models")]
    try:
        family: ModelFamily = registry.resolve("slime.models", name)
    except PluginError as error:
        if name in installed or ":" in name:
            raise
        where = "model.model_name" if named else f"{folder / 'config.json'}: model_type"
        raise PluginError(
            f"{where}: found {name!r}; wanted a model family that is installed: {error}; `slime models` lists "
            "them, and `slime models new NAME` writes the skeleton of one of your own (docs/add-a-model.md)"
        ) from error
    return family
