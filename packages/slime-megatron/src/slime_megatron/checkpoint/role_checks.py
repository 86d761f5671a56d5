"""Checks of the folders that roles start from. Imports neither torch nor megatron before there is one of Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import CheckpointError, DataError, Problem

from slime_megatron.settings.section_roles import RolesSection

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily


def role_problems(roles: RolesSection, family: ModelFamily, architecture: Architecture) -> Iterator[Problem]:
    """Yield what is wrong with folders of Megatron that roles start from; of Hugging Face's their own weights tell at the start."""
    for name in ("actor_load", "ref_load", "opd_teacher_load", "critic_load"):
        given = getattr(roles, name)
        folder = None if given is None else Path(given)
        if folder is None or not folder.is_dir() or (folder / "config.json").is_file():
            continue
        from slime_megatron.checkpoint.stored_as_hf import HF_HEAD, weights_of  # imports torch

        wanted = f"the weights of a {architecture.model_type} model"
        try:
            if HF_HEAD in weights_of(folder, family, architecture) and name != "critic_load":
                yield Problem(f"roles.{name}", f"{folder}, which is a critic", wanted)
        except (CheckpointError, DataError) as error:
            yield Problem(f"roles.{name}", str(error), wanted)
