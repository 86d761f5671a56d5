"""The base of every section of settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SectionModel(BaseModel):
    """A table of settings: frozen, refuses unknown keys, and takes each field's docstring as its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
