"""`check_filled`: whether the trainer filled the columns of a view that options need."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.errors import TrainerError
from slime_core.protocols import TokenView


def check_filled(view: TokenView, fields: Iterable[str], *, name: str) -> None:
    """Refuse a view that lacks a field.

    Raises:
        TrainerError: names the fields, and `name`, the estimator or loss that wants them.
    """
    missing = sorted(field for field in fields if getattr(view, field) is None)
    if missing:
        raise TrainerError(
            f"{name}: TokenView has no {', '.join(missing)}, which its options ask for; "
            "the trainer must fill what `slime_core.protocols.needs_of` names"
        )
