"""`StatefulEstimator`: the advantage estimator, and the state that it keeps from step to step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.protocols import TokenView
from slime_core.protocols.correction import Correction
from torch import Tensor


class StatefulEstimator:
    """Calls an advantage estimator with the state that its last call returned, if it takes one.

    Args:
        estimator: of the algorithm.
    """

    def __init__(self, estimator: Callable[..., tuple[Any, ...]]) -> None:
        self._estimator = estimator
        self._takes_state = "state" in inspect.signature(estimator).parameters
        #: JSON values; checkpoints hold them, and loading one changes this in place.
        self.state: dict[str, Any] = {}

    def __call__(self, view: TokenView) -> tuple[Tensor, Tensor, Mapping[str, Any], Correction]:
        """Return (advantages [T], returns [T], metrics, correction) of the whole batch, and keep the new state."""
        given = {"state": dict(self.state)} if self._takes_state else {}
        advantages, returns, *more = self._estimator(view, **given)
        defaults: tuple[Any, ...] = ({}, {}, Correction())
        metrics, state, correction = (*more, *defaults[len(more) :])
        self.state.clear()
        self.state.update(state)
        return advantages, returns, metrics, correction
