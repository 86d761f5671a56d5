"""The model family of a run: the table of rules between its Hugging Face weights and the trainer's."""

from __future__ import annotations

from slime_core.config.build import BuildContext
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config


def model_family(build: BuildContext) -> ModelFamily:
    """Return the family of a run's model: the one that `model_name` names, or that the folder's config.json does."""
    model_type = build.settings.model.model_name or read_config(build.model_path).get("model_type")
    family: ModelFamily = build.registry.resolve("slime.models", str(model_type))
    return family
