"""`TransferPlan`: what trainer and engine agree on for one weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """One weight update that both sides agreed on: the engine opens it, the trainer fills it."""

    transport: str
    """Name of a transport that both sides take (see their `capabilities`)."""
    version: str
    """Version that the engine reports once the update is done."""
    dtype: str
    """Storage dtype that the engine wants, as torch spells it: `bfloat16`."""
    quantization: Mapping[str, Any] | None = None
    """`quantization_config` of the Hugging Face folder that the engine serves: which tensors it wants in few bits, with
    their scales. None: all of them in `dtype`."""
    channel: Any = None
    """Where the tensors go; its type belongs to the transport (`memory`: `weights.MemoryChannel`; others: a class of the
    transport's own module). Plans of one agreement are equal, also after crossing a process."""


#: Hugging Face tensor name -> checksum of the tensor as it is sent: in the engine's dtype, or as codes and scales.
Fingerprint = dict[str, int]
