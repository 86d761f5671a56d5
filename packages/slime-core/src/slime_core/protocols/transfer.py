"""`TransferPlan`: what trainer and engine agree on for one weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: Which ranks of a trainer send its weights: rank 0 to all servers; one on each machine, to the servers there; or one of each pipeline
#: stage (`TrainerCapabilities.stage_senders`), its own to all servers.
Senders = Literal["first", "each_machine", "each_stage"]


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
    senders: Senders = "first"
    """Which ranks of a trainer of several send."""
    sender: int = 0
    """Which of the senders this plan is for: 0 is the trainer's rank 0. Launchers of several ranks give each its own plan."""
    n_senders: int = 1
    """How many ranks send."""
    channel: Any = None
    """Where the tensors go; its type belongs to the transport (`memory`: `weights.MemoryChannel`; others: a class of the
    transport's own module). Plans of one agreement are equal, also after crossing a process."""

    @property
    def sends_stage_alone(self) -> bool:
        """Whether a sender sends the weights of its pipeline stage alone, and ranks that help it to gather them help with those."""
        return self.senders == "each_stage" and self.n_senders > 1


#: Hugging Face tensor name -> checksum of the tensor as it is sent: in the engine's dtype, or as codes and scales.
Fingerprint = dict[str, int]
