"""`SharedLossScaler`: Megatron's loss scaler for float16, shared where there are several optimizers."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from torch import Tensor


class SharedLossScaler:
    """A loss scaler that several optimizers share. It changes once an optimizer step, when all have unscaled their gradients.

    Megatron 0.19.2 gives the optimizer of experts a scaler of its own, which leaves the other's when gradients of one
    alone overflow, while the loss is scaled by the first.

    Args:
        inner: Megatron's.
    """

    def __init__(self, inner: MegatronGradScaler) -> None:
        self._inner = inner

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied by: float32 [1]."""
        scale: Tensor = self._inner.scale
        return scale

    @property
    def inv_scale(self) -> Tensor:
        """What gradients are multiplied by: float32 [1]."""
        inv_scale: Tensor = self._inner.inv_scale
        return inv_scale

    @property
    def can_fall(self) -> bool:
        """Whether an overflow makes it smaller: it is dynamic, and above its minimum."""
        least = getattr(self._inner, "min_scale", None)
        return least is not None and bool(self._inner.scale > least)

    def update(self, found_inf: bool) -> None:
        """Do nothing: each optimizer calls this by itself."""

    def settle(self, *, overflow: bool) -> None:
        """Note the end of an optimizer step."""
        self._inner.update(overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return Megatron's state."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        if state:
            self._inner.load_state_dict(state)
