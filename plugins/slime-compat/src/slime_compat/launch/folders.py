"""What a folder that a launch script names for weights is: a run of slime, a folder of Megatron, of Hugging Face, or nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from slime_core.files.strict_read import read_text

#: What the names of quantised folders end with, or nothing.
_QUANTIZED = r"([-_.](fp8|int4|int8|w4a16|w8a8|mxfp4|nvfp4)\w*)?"
Kind = Literal["run", "megatron", "hugging_face", "nothing", "other"]

#: Megatron's own file beside the folders of iterations.
_TRACKER = "latest_checkpointed_iteration.txt"


def kind_of(folder: Path) -> Kind:
    """Return what a folder is; `nothing` also for an empty one."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return "nothing"
    if any(folder.glob("checkpoints/step_*")) or any(folder.glob("step_*/state.json")):
        return "run"
    if (folder / _TRACKER).is_file() or (folder / ".metadata").is_file():
        return "megatron"
    if (folder / "config.json").is_file():
        return "hugging_face"
    if (folder / "config.toml").is_file():
        return "nothing"  # a run that ended before its first checkpoint
    return "other"


def at_iteration(folder: Path, step: str | None) -> Path:
    """Return the folder of one iteration within a folder of Megatron; itself where none is asked for."""
    return folder if step is None else folder / f"iter_{int(step):07d}"


def stand_in(folder: Path, hugging_face: Path) -> Path | None:
    """Return the Hugging Face folder whose weights a Megatron folder that is not there was to hold; None where none is known.

    The reference's guides convert `MODEL` to `MODEL_torch_dist`, also where servers start from `MODEL-FP8`.
    """
    name = folder.name.removesuffix("_torch_dist")
    if name == folder.name:
        return None
    beside = folder.with_name(name)
    if name != hugging_face.name and kind_of(beside) == "hugging_face":
        return beside
    return (
        hugging_face if re.fullmatch(re.escape(name) + _QUANTIZED, hugging_face.name, re.IGNORECASE) else None
    )


def config_of(folder: Path) -> dict[str, object]:
    """Return config.json of a Hugging Face folder; empty where there is none that can be read: who needs it says so."""
    try:
        found = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
