"""`trainer.json` of a checkpoint: reading it, and comparing it with a trainer. Imports neither torch nor megatron."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import AllowInfNan, BaseModel, ConfigDict
from slime_core.errors import CheckpointError
from slime_core.files.strict_read import Counted, Unreadable, checked, json_object, read_file
from slime_models.family.architecture import Architecture

#: What the weights of two roles may differ in.
_MAY_DIFFER = ("max_position_embeddings", "mtp_num_layers", "holds_mtp")
#: Written last: a folder without it is incomplete.
DESCRIPTION = "trainer.json"


class _Lora(BaseModel):
    """What must be said of adapters."""

    model_config = ConfigDict(strict=True)
    rank: Annotated[int, Ge(1)]
    alpha: Annotated[float, AllowInfNan(False)]


class _Description(BaseModel):
    """What must be in the file. Folders of earlier versions lack what has a default."""

    model_config = ConfigDict(strict=True)
    format: Literal[1]
    architecture: dict[str, Any]
    optimizer_steps: Counted
    skipped_in_a_row: Counted = 0
    lora: _Lora | None = None
    estimator: dict[str, Any] = {}
    train: dict[str, float | str] = {}
    roles: list[str] = []


def adapter_scale(description: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return the rank of a checkpoint's adapters, and what B A is multiplied by; None where it has none."""
    lora = description.get("lora")
    return None if lora is None else (lora["rank"], lora["alpha"] / lora["rank"])


def read_description(folder: Path) -> dict[str, Any]:
    """Return what a folder that the trainer wrote says of itself.

    A field of the architecture that there was not yet when it was written has its default.

    Raises:
        CheckpointError: it has no description, or one that is not what the trainer writes.
    """
    path = folder / DESCRIPTION
    try:
        description = json_object(read_file(path), with_nan=True)
        checked(_Description, description)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: has no {DESCRIPTION}; wanted a complete checkpoint of this trainer"
        ) from error
    except Unreadable as error:
        raise CheckpointError(f"{path}: found {error}; wanted what the trainer megatron writes") from error
    defaults = _as_json(
        {
            field.name: field.default
            for field in dataclasses.fields(Architecture)
            if field.default is not MISSING
        }
    )
    return description | {"architecture": defaults | description["architecture"]}


def describe(architecture: Architecture) -> dict[str, Any]:
    """Return an architecture as JSON values, without the padding of its vocabulary, which belongs to a layout."""
    return _as_json(dataclasses.asdict(architecture.with_padded_vocab(1)))


def check_alike(found: Mapping[str, Any], wanted: Architecture, *, whose: str) -> None:
    """Check that the weights of a described architecture are those of the policy's model.

    Args:
        found: the description (see `describe`).
        wanted: of the policy.
        whose: weights they are, in the error.

    Raises:
        CheckpointError: names the first field that differs.
    """
    for name, mine in describe(wanted).items():
        if found.get(name) != mine and name not in _MAY_DIFFER:
            raise CheckpointError(
                f"{whose}: {name} is {found.get(name)!r}, the policy's is {mine!r}; a role shares the policy's model: give "
                "weights of the same architecture"
            )


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def check_same(
    found: Mapping[str, Any], wanted: Mapping[str, Any], *, whose: str, todo: str, prefix: str = ""
) -> None:
    """Check that a folder's description has the values that are wanted of it.

    Args:
        found: the folder's.
        wanted: key -> value, tables of them among them.
        whose: whose values are wanted, in the error.
        todo: what to do about another one, in the error.
        prefix: of the names of keys.

    Raises:
        CheckpointError: names the first key whose value is another.
    """
    for key, value in wanted.items():
        other = found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            check_same(other, value, whose=whose, todo=todo, prefix=f"{prefix}{key}.")
        elif other != value:
            raise CheckpointError(f"checkpoint: {prefix}{key} is {other!r}, {whose} is {value!r}; {todo}")
