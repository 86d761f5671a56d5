"""`UpdateDescription`: what the ranks of a server are told of an update that they receive themselves: a file beside their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import WeightSyncError
from slime_models.tensor_spec import Spec
from slime_models.transfer.meeting import BroadcastChannel, channel_text, read_channel
from slime_models.transfer.ranks.update import RanksUpdate


@dataclass(frozen=True, kw_only=True)
class UpdateDescription:
    """An update that ranks receive themselves."""

    version: str
    channel: BroadcastChannel
    specs: Mapping[str, Spec]
    """Every tensor that it must have, by Hugging Face name."""


def write_description(update: RanksUpdate, path: Path) -> None:
    """Write a description that only this user can read, as it holds the secret of the update's group."""
    about = json.dumps({"version": update.version, "channel": channel_text(update.channel)})
    path.touch(mode=0o600)
    path.write_text(f"[{about}, {update.specs_text}]")


def read_description(path: Path) -> UpdateDescription:
    """Read what `write_description` wrote.

    Raises:
        WeightSyncError: this host does not see the file.
    """
    try:
        about, tensors = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"{path}: the server's host does not see this file; --output-dir must be a folder that both hosts see under one name"
        ) from error
    specs = {name: Spec(shape=tuple(one["shape"]), dtype=one["dtype"]) for name, one in tensors.items()}
    return UpdateDescription(version=about["version"], channel=read_channel(about["channel"]), specs=specs)
