"""The config.json of Hugging Face folders, read without torch: for checks of runs that need none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError, DataError, Problem
from slime_core.files.strict_read import read_text

#: A folder's file of weights, or the list of its several.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of a Hugging Face folder.

    Raises:
        DataError: it is missing, or is not a JSON object; names the file.
    """
    return read_json(folder / "config.json", DataError)


def read_json(path: Path, error_type: type[CheckpointError | DataError]) -> dict[str, Any]:
    """Return the JSON object that a file of a Hugging Face folder holds.

    Raises:
        CheckpointError | DataError: `error_type`; it is missing, or is not a JSON object; names the file.
    """
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise error_type(f"{path}: missing; wanted a Hugging Face folder") from error
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise error_type(
            f"{path}: cannot be read as JSON: {why}; wanted a JSON object; fetch the folder again"
        ) from error
    if not isinstance(value, dict):
        raise error_type(f"{path}: found a JSON {type(value).__name__}; wanted an object")
    return value


def has_weights(folder: Path) -> bool:
    """Return whether a Hugging Face folder has weights."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def missing_weights(folder: Path) -> Iterator[Problem]:
    """Yield that a Hugging Face folder has no file of weights."""
    if folder.is_dir() and not has_weights(folder) and not any(folder.glob("model*.safetensors")):
        yield Problem(
            "model.hf_checkpoint",
            f"{folder}, which has no weights",
            f"{SINGLE}, or {INDEX} and the files that it lists",
            "fetch the folder again",
        )
