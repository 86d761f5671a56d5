"""`LearnerSettings`: what each rank of the trainer is built from. Imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext, MemoryQuestion, Rank
from slime_core.config.sections import TrainSection
from slime_core.protocols import Role
from slime_core.run.assemble import Algorithm
from slime_models.family.chosen import family_of_config
from slime_models.hf.config import read_config

from slime_megatron.settings.derive import Frozen, frozen_models
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection
from slime_megatron.settings.user_hooks import MegatronHooks

if TYPE_CHECKING:
    from slime_models.family.family import ModelFamily


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """What a learner is built from; picklable if the functions of `algorithm` are."""

    model_path: Path
    """Hugging Face folder of config and tokenizer, and of the initial weights where nothing else is given."""
    family: ModelFamily
    """Of that folder's model_type."""
    train: TrainSection
    """Core's settings of training."""
    megatron: MegatronSection
    """Ours."""
    seed: int
    """Of everything random."""
    total_steps: int | None = None
    """Optimizer steps of the policy in the run; needed by a learning rate that decays without `lr_decay_iters`."""
    critic_total_steps: int | None = None
    """Those of the critic."""
    algorithm: Algorithm
    """Estimator and loss."""
    roles: RolesSection = field(default_factory=RolesSection)
    """Of the models beside the policy."""
    lora: LoraSection = field(default_factory=LoraSection)
    """Of adapters."""
    hooks: MegatronHooks = field(default_factory=MegatronHooks)
    """A user's own functions."""
    actor_path: Path | None = None
    """Folder of the initial weights: of Hugging Face, or of Megatron (see `checkpoint.stored_as_hf`); `model_path` when None."""
    ref_path: Path | None = None
    """Folder of the reference; the initial weights when None."""
    teacher_path: Path | None = None
    """Folder of the teacher; samples carry its log-probs when None."""
    rank: Rank = field(default_factory=Rank)
    """Which of the trainer's processes this is."""
    restricted: bool = False
    """Whether tokens are drawn from what top-p or top-k keep; batches then say from which ids."""
    apart: frozenset[Role] = frozenset()
    """Roles that have processes of their own: this is one of them if its `rank` says so, else one of the policy's."""
    critic_path: Path | None = None
    """Folder that the critic starts from; `first_path` when None."""

    @property
    def first_path(self) -> Path:
        """Folder of the policy's initial weights."""
        return self.actor_path or self.model_path

    @property
    def hf_path(self) -> Path:
        """The folder of Hugging Face that the initial weights are of, or the model's where those are in Megatron's form."""
        return self.first_path if (self.first_path / "config.json").is_file() else self.model_path

    @property
    def frozen(self) -> Mapping[Frozen, Path | None]:
        """The frozen models that are read, and the folder of each; None for a copy of the policy's initial weights."""
        paths = {"ref": self.ref_path, "teacher": self.teacher_path}
        read = frozen_models(self.algorithm.needs, has_teacher=self.teacher_path is not None)
        return {name: paths[name] for name in read}


def family_of(build: BuildContext | MemoryQuestion) -> tuple[ModelFamily, dict[str, Any]]:
    """Return the family of the model, and its config.json.

    Raises:
        PluginError: no installed family has its model_type; names the nearest.
    """
    folder, named = build.model_path, build.settings.model.model_name
    config = read_config(folder)
    return family_of_config(build.registry, config, folder, named=named), config
