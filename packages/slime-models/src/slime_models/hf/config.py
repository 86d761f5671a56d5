"""The config.json of Hugging Face folders, read without torch: for checks of runs that need none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError, DataError
from slime_core.files.strict_read import read_text


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
