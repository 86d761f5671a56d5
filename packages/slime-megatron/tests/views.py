"""The views that losses saw, on the host, where tests compare them with what transformers computes there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_core.run.assemble import Algorithm

from .algorithms import policy_gradient
from .host_copies import on_host


def recording(*needs: str) -> tuple[Algorithm, list[Any]]:
    """Return policy gradient, and the list to which its loss appends every view that it sees."""
    inner, views = policy_gradient(*needs), []

    def loss(view: Any, advantages: Any) -> Any:
        views.append(on_host(view))
        return inner.loss(view, advantages)

    return replace(inner, loss=loss), views
