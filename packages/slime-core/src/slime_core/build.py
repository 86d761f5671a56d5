"""`BuildContext`: what a component's factory is given to build itself from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slime_core.protocols import Tokenizer

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.plugins.registry import Registry

SectionT = TypeVar("SectionT")


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Everything a factory (`create_engine(build)`, `create_trainer(build)`, ...) may draw on.

    A factory reads the sections that it needs and hands on single values; it does not pass the context on.
    """

    settings: Settings
    """Resolved settings; read a section with `build.section(SectionType)`."""
    registry: Registry
    """Resolves further plugins by group and name."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    model_path: Path
    """Local Hugging Face folder of the model."""
    run_dir: Path
    """Folder of this run."""
    evaluation: bool = False
    """Whether the component is for evaluation: a data source then hands out its held-out prompts."""

    def section(self, section_type: type[SectionT]) -> SectionT:
        """Return the settings of the section that `section_type` declares."""
        return self.settings.section(section_type)
