"""`family_of_folder`: the family of a Hugging Face folder, by the model_type in its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry

from slime_models.hf.config import read_config

if TYPE_CHECKING:
    from slime_models.family.family import ModelFamily


def family_of_folder(registry: Registry, folder: Path, *, named: str | None = None) -> ModelFamily:
    """Return the family of the model in a folder.

    Args:
        registry: of what is installed.
        folder: with a config.json.
        named: `model_name`, which overrules the file's `model_type`.

    Raises:
        DataError: config.json cannot be read; names the file.
        PluginError: no installed family has that model_type; names the nearest, and says how to add one.
    """
    name = named or str(read_config(folder).get("model_type", ""))
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
