"""`SectionModel`, the base of every section of settings, and bounded number types for their fields."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict

#: Most of what is counted: far beyond any use, and far below where arithmetic on it ends.
MOST = 2**31 - 1

#: How many, at least one.
Count = Annotated[int, Ge(1), Le(MOST)]
#: How much memory, at least one byte.
Bytes = Annotated[int, Ge(1), Le(2**63 - 1)]
#: How many, or which one, from 0.
Index = Annotated[int, Ge(0), Le(MOST)]
#: What random numbers begin from.
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
#: A part of a whole, more than nothing of it.
Share = Annotated[float, Gt(0), Le(1)]
#: A rate of decay: what is kept of an average.
Decay = Annotated[float, Ge(0), Lt(1)]
#: A deadline; at most ten years.
Seconds = Annotated[float, Ge(1e-3), Le(3e8)]
#: A number of the arithmetic of sampling or training that has no sign.
Amount = Annotated[float, Ge(0), Le(1e9)]
#: The same, and not 0.
Positive = Annotated[float, Gt(0), Le(1e9)]
#: A number of that arithmetic that may have a sign.
Weight = Annotated[float, Ge(-1e9), Le(1e9)]
#: Text that says something.
Text = Annotated[str, MinLen(1)]


def _at_home(path: str) -> str:
    """Return a path, or the place of a dataset (`hf:`), with the user's home in the place of `~`, as a shell has it."""
    prefix = "hf:" if path.startswith("hf:") else ""
    return prefix + os.path.expanduser(path.removeprefix(prefix))


#: Path of a file or a folder, in which `~` is the user's home.
FilePath = Annotated[str, AfterValidator(_at_home)]


class Unset(AttributeError):
    """Raised on reading a setting without a value: the given one was invalid and is reported already."""


class SectionModel(BaseModel):
    """A table of settings: frozen, refuses unknown keys, and takes each field's docstring as its help text.

    Numbers are finite, but for fields that allow more. Recipes are read strictly: true is no number, 1.0 is no count.
    A field's own check (`field_validator`) raises ValueError with what it wants.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    reads: ClassVar[tuple[str, ...]] = ()
    """Fields that name folders or files which a run reads, and neither deletes nor writes over."""
    of_first_stage: ClassVar[tuple[str, ...]] = ()
    """Fields that name what a run starts from: of a recipe's stages the first alone has them."""

    def __getattr__(self, name: str) -> Any:
        """Raise `Unset` for a setting that has no value.

        Raises:
            Unset: the settings are wrong, and this is one of those (see `config.load.read_runs`).
        """
        if name in type(self).model_fields:
            raise Unset(name)
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides it from type checkers
