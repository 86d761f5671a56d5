"""Where an update goes, by transport: what the receiver puts into `TransferPlan.channel` for the sender.

Plain values, so that a plan may cross a process. The channel of `memory` is core's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Encoding = Literal["xor", "overwrite"]


@dataclass(frozen=True, kw_only=True)
class DiskChannel:
    """Transport `disk`: a Hugging Face folder, which appears whole."""

    folder: Path
    """To be made; both sides see it."""
    config_from: Path
    """Hugging Face folder whose other files go with the weights."""


@dataclass(frozen=True, kw_only=True)
class DeltaChannel:
    """Transport `disk-delta`: a folder with changes, or with everything, which appears whole."""

    folder: Path
    """To be made; both sides see it."""
    base: str | None
    """`Manifest.digest` of the weights that the receiver would apply changes to; None if it has none."""
    encoding: Encoding


@dataclass(frozen=True, kw_only=True)
class BroadcastChannel:
    """Transport `distributed`: a process group of the sender, rank 0, and the receivers, made for one update."""

    host: str
    port: int
    """Of the store where the group meets."""
    key: str
    """Prefix of this update's keys in the store."""
    secret: str = field(repr=False)
    """Of this update: each side proves to the others that it knows it, before anything is sent."""
    n_receivers: int
    timeout_s: float
    """Deadline of meeting, and of each broadcast."""
