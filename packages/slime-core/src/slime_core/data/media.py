"""Images in prompts: in data files, in samples, and in requests to the engine.

An image is a str: the path of a file, or a `data:` URL with its bytes. `Sample.multimodal_inputs["image"]` lists those of
a prompt in the order of their placeholders. `Sample.tokens` are the ids that the model sees, each placeholder as long as
its image.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import DataError


def image_of(value: Any, *, where: str, root: Path) -> str:
    """Return an image of a data file as a str, as samples hold it.

    Data files often come from others, and must not choose which of the user's files a model sees.

    Args:
        value: path, from `root` if it is relative; `data:` URL; bytes of a file; or a table with one of them under
            `bytes` or `path`, as Hugging Face data sets have it.
        where: the row, for the error.
        root: folder that paths must stay in.

    Raises:
        DataError: a path leads out of `root`, or it is something else; an address in the network among them.
    """
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, bytes):
        return "data:image;base64," + base64.b64encode(value).decode()
    if isinstance(value, str) and value.startswith("data:"):
        return value
    if isinstance(value, str) and value and "://" not in value and "\0" not in value:
        top = os.path.normpath(root.absolute())
        path = os.path.normpath(os.path.join(top, value))  # Path keeps `..`
        if os.path.commonpath([top, path]) != top:
            raise DataError(
                f"{where}: found the image {value[:200]!r}, which is not in {top}; wanted a file there; move it, or name "
                "the folder that images may be read from (--media-root)"
            )
        return path
    raise DataError(
        f"{where}: found {str(value)[:60]!r} for an image; wanted the path of a file, a data: URL, or bytes"
    )
