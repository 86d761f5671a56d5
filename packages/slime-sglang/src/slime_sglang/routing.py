"""Which experts each token passed, as a server says it."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_sglang.client import ServerFaultError


@dataclass(frozen=True)
class Routing:
    """What a server says of each token."""

    n_layers: int
    topk: int

    def decode(self, text: str, *, n_rows: int) -> NDArray[np.int16]:
        """Return the experts [n_rows, n_layers, topk] that an answer holds.

        Raises:
            ServerFaultError: it holds more or fewer.
        """
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        shape = (n_rows, self.n_layers, self.topk)
        if flat.size != math.prod(shape):
            raise ServerFaultError(
                f"/generate: {flat.size} experts came; wanted {n_rows} tokens x {self.n_layers} layers x {self.topk}"
            )
        return flat.reshape(shape).astype(np.int16)


def routing_of(config: Mapping[str, Any], info: Mapping[str, Any]) -> Routing | None:
    """Return how a server says which experts each token passed; None where it does not.

    Args:
        config: the model's config.json.
        info: what the server answers to `/server_info`.
    """
    if not info.get("enable_return_routed_experts"):
        return None
    return Routing(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]))
