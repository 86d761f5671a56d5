"""The reference's dumps of rollouts: `{rollout_id, samples}` as a file of torch's, written and read.

Source: `save_debug_rollout_data` of slime/ray/rollout.py. A file is read without running anything that it may hold.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.rollouts.recorded import grouped, path_of
from slime_core.samples import Group, Sample

#: Fields of our samples that are not in theirs go here, within the sample's metadata, and come back from there.
_OURS = "slime_fields"
#: Fields of theirs that ours lack.
_THEIRS = ("multimodal_train_input_id", "trace")
#: Fields that both have.
_SHARED = frozenset({
    "index", "group_index", "rollout_id", "prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask",
    "weight_versions", "rollout_log_probs", "teacher_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
    "rollout_routed_experts", "status", "remove_sample", "multimodal_inputs", "multimodal_train_inputs",
    "apply_chat_template_kwargs", "metadata", "train_metadata", "generate_function_path", "custom_rm_path", "session_id",
    "non_generation_time", "spec_info", "prefix_cache_info",
})  # fmt: skip


def write_dump(template: str, step: int, groups: Sequence[Group]) -> Path:
    """Write a step's samples, whole or not at all; returns the file.

    Args:
        template: path with `{rollout_id}` in it, which is one less than `step`.
        step: from 1.
        groups: generated and scored.
    """
    import torch

    path = path_of(template, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        samples = [_as_theirs(sample) for group in groups for sample in group]
        torch.save({"rollout_id": step - 1, "samples": samples}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


async def recorded_dump(run: RolloutRun, step: int, *, samples: str) -> list[Group]:
    """Return the groups of a dump: the rollout `recorded-dump`.

    Args:
        run: reads nothing else.
        step: from 1.
        samples: path with `{rollout_id}` in it.

    Raises:
        DataError: the file is not there, or is no dump; names it.
    """
    return read_dump(path_of(samples, step))


def read_dump(path: Path) -> list[Group]:
    """Return the groups of one file; raises as `recorded_dump` does."""
    import torch

    if not path.is_file():
        raise DataError(f"{path}: found no file; wanted a dump of a rollout (--save-debug-rollout-data)")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is raised depends on what is damaged, and how
        raise DataError(
            f"{path}: found {type(error).__name__}: {error}; wanted a dump of plain values"
        ) from error
    rows = held.get("samples") if isinstance(held, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: found no list of samples; wanted {{'rollout_id': N, 'samples': [...]}}")
    return grouped([_as_ours(row) for row in rows], where=str(path))


def _as_theirs(sample: Sample) -> dict[str, Any]:
    row = {field.name: _plain(getattr(sample, field.name)) for field in dataclasses.fields(sample)}
    own = {name: row.pop(name) for name in list(row) if name not in _SHARED}
    row["status"] = str(sample.status)
    row["metadata"] = {**sample.metadata, _OURS: own}
    return row


def _as_ours(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of their samples as fields of ours; keys that neither has become metadata, as they become attributes there."""
    fields = {name: value for name, value in row.items() if name in _SHARED}
    metadata = dict(fields.get("metadata") or {})
    fields |= metadata.pop(_OURS, {})
    metadata |= {name: value for name, value in row.items() if name not in _SHARED and name not in _THEIRS}
    return fields | {"metadata": metadata}


def _plain(value: Any) -> Any:
    """Return a column as a list, which a reader needs nothing of ours for."""
    return (
        value.tolist()
        if hasattr(value, "tolist")
        else list(value)
        if type(value).__name__ == "Compact"
        else value
    )
