"""Which experts each token was routed to, as a server reports it."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_sglang.http.client import ServerFaultError


@dataclass(frozen=True)
class RoutedExpertsFormat:
    """Shape of the routed experts that a server reports."""

    n_layers: int
    """Layers of the model; dense ones are reported, too."""
    topk: int
    """Experts of each token in each layer."""

    def decode(self, text: str, *, n_rows: int) -> NDArray[np.int16]:
        """Return the experts that an answer holds, as int16 [n_rows, n_layers, topk].

        Raises:
            ServerFaultError: it holds more or fewer than `n_rows` tokens have.
        """
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        shape = (n_rows, self.n_layers, self.topk)
        if flat.size != math.prod(shape):
            raise ServerFaultError(
                f"/generate: {flat.size} experts came; wanted {n_rows} tokens x {self.n_layers} layers x {self.topk}"
            )
        return flat.reshape(shape).astype(np.int16)


def routed_experts_format(config: Mapping[str, Any], info: Mapping[str, Any]) -> RoutedExpertsFormat | None:
    """Return how a server reports routed experts; None where it does not.

    Args:
        config: the model's config.json.
        info: what the server answers to `/server_info`.
    """
    if not info.get("enable_return_routed_experts"):
        return None
    return RoutedExpertsFormat(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]))
