"""The model family of a run: the table of rules between its Hugging Face weights and the trainer's."""

from __future__ import annotations

from slime_core.config.build import BuildContext
from slime_models.family.chosen import family_of_config
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config


def model_family(build: BuildContext) -> ModelFamily:
    """Return the family of a run's model: the one that `model_name` names, or that the folder's config.json does."""
    folder, named = build.model_path, build.settings.model.model_name
    return family_of_config(build.registry, read_config(folder), folder, named=named)
