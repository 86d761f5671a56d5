"""`Settings`: every section's values, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import tomli_w

from slime_core.config.base import SectionModel
from slime_core.config.secrets import masked
from slime_core.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    EnvironmentSection,
    EvalSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TrainSection,
)
from slime_core.errors import ConfigError, Problem

SectionT = TypeVar("SectionT")


@dataclass(frozen=True)
class Settings:
    """Resolved, validated, immutable settings."""

    sections: Mapping[str, SectionModel]
    """Table name -> values."""
    origins: Mapping[tuple[str, str], str]
    """(table, field) -> where its value came from; fields that are not listed have their default."""
    owners: Mapping[str, str]
    """Table name -> distribution that declared it."""

    def section(self, section_type: type[SectionT]) -> SectionT:
        """Return the values of the section that `section_type` declares.

        Raises:
            ConfigError: no installed plugin declares it.
        """
        for section in self.sections.values():
            if type(section) is section_type:
                return section
        raise ConfigError(
            [
                Problem(
                    "settings", f"no section {section_type.__name__}", "an installed plugin that declares it"
                )
            ]
        )

    @cached_property
    def run(self) -> RunSection:
        """Table `[run]` of a recipe: what runs, how long and where to."""
        return self.section(RunSection)

    @cached_property
    def model(self) -> ModelSection:
        """Table `[model]` of a recipe: the model."""
        return self.section(ModelSection)

    @cached_property
    def data(self) -> DataSection:
        """Table `[data]` of a recipe: prompts."""
        return self.section(DataSection)

    @cached_property
    def rollout(self) -> RolloutSection:
        """Table `[rollout]` of a recipe: generating."""
        return self.section(RolloutSection)

    @cached_property
    def environment(self) -> EnvironmentSection:
        """Table `[environment]` of a recipe: the environment of multi-turn generation."""
        return self.section(EnvironmentSection)

    @cached_property
    def reward(self) -> RewardSection:
        """Table `[reward]` of a recipe: rewards."""
        return self.section(RewardSection)

    @cached_property
    def algorithm(self) -> AlgorithmSection:
        """Table `[algorithm]` of a recipe: advantages and loss."""
        return self.section(AlgorithmSection)

    @cached_property
    def train(self) -> TrainSection:
        """Table `[train]` of a recipe: training."""
        return self.section(TrainSection)

    @cached_property
    def cluster(self) -> ClusterSection:
        """Table `[cluster]` of a recipe: devices and processes."""
        return self.section(ClusterSection)

    @cached_property
    def checkpoint(self) -> CheckpointSection:
        """Table `[checkpoint]` of a recipe: saving and loading."""
        return self.section(CheckpointSection)

    @cached_property
    def eval(self) -> EvalSection:
        """Table `[eval]` of a recipe: evaluation."""
        return self.section(EvalSection)

    def section_of(self, distribution: str) -> dict[str, Any]:
        """Return the values of all sections that a distribution declares, by field."""
        values: dict[str, Any] = {}
        for name, section in self.sections.items():
            if self.owners[name] == distribution:
                values |= section.model_dump()
        return values

    def origin(self, table: str, field: str) -> str:
        """Say where a value came from: a recipe, a flag, or `default`."""
        return self.origins.get((table, field), "default")

    def having(self, table: str, field: str, value: Any, *, origin: str) -> Settings:
        """Return settings in which one value is another; it is not validated."""
        section = self.sections[table].model_copy(update={field: value})
        return Settings(
            {**self.sections, table: section}, {**self.origins, (table, field): origin}, self.owners
        )

    def to_toml(self, *, is_public: bool = False) -> str:
        """Return all values as a recipe. What TOML lacks is a string: `none`, and a table or list with a null in it as JSON.

        Args:
            is_public: whether secrets are masked, for those who do not see the run's folder.
        """
        tables = {name: section.model_dump(mode="json") for name, section in self.sections.items()}
        return tomli_w.dumps(
            {
                name: {
                    key: _for_toml(masked(key, value) if is_public else value) for key, value in table.items()
                }
                for name, table in tables.items()
            }
        )


def _for_toml(value: Any) -> Any:
    if value is None:
        return "none"
    return json.dumps(value) if _holds_none(value) else value


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_holds_none, value.values() if isinstance(value, dict) else value))
    return value is None
