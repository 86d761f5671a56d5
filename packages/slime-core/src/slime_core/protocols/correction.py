"""`Correction`: importance weights and token masks that an estimator returns if engine and trainer differ (off-policy)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import PluginError


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Which tokens a loss sees, and how much each counts, where the engine's policy is not the trainer's.

    The trainer applies it before any loss is computed: advantages, and what a loss selects by them, know nothing of it.
    """

    importance: Any = None
    """float32 [T]: factor of each token's policy loss, but not of its entropy or KL terms; None for 1. A loss must
    declare that it applies it, by the attribute `weighs_importance`."""
    kept: Any = None
    """bool [T]: False where a token is rejected; it then has no loss of any kind, as if its mask were 0. None: all kept."""
    count_rejected: bool = True
    """Whether rejected tokens still count in what the reducer divides by."""

    def check_loss(self, loss: Any) -> None:
        """Refuse a loss that would leave the importance weights out.

        Raises:
            PluginError: names the loss, and says how one declares that it applies them.
        """
        if self.importance is not None:
            _check_weighs(loss)


#: Optional fields of `TokenView` that a function of `--custom-tis-function-path` reads.
_READ = frozenset({"old_log_probs", "rollout_log_probs"})


def with_correction(
    estimator: Callable[..., tuple[Any, ...]], correct: Callable[..., Any], *, name: str
) -> Callable[..., tuple[Any, ...]]:
    """Return the estimator with the correction of a function of its own (`--custom-tis-function-path`).

    Args:
        estimator: its options bound.
        correct: called with the view as the group `slime.corrections` says, its options bound.
        name: of that function, for messages.
    """
    options = dict(getattr(estimator, "keywords", {}))

    @functools.wraps(estimator)
    def corrected(view: Any, **given: Any) -> tuple[Any, ...]:
        advantages, returns, *more = estimator(view, **given)
        defaults: tuple[Any, ...] = ({}, {}, Correction())
        metrics, state, own = (*more, *defaults[len(more) :])
        if own.importance is not None or own.kept is not None:
            raise PluginError(
                f"{name}: the estimator corrects, too (--use-rs or --max-token-staleness); wanted one of the two"
            )
        answer = correct(view)
        correction, found = answer if isinstance(answer, tuple) else (answer, {})
        if not isinstance(correction, Correction) or not isinstance(found, Mapping):
            raise PluginError(
                f"{name}: returned {type(answer).__name__}; wanted a Correction, or that and a dict of metrics"
            )
        return advantages, returns, {**metrics, **found}, state, correction

    made: Any = corrected
    own_needs = getattr(estimator, "needs", None)
    also = frozenset(getattr(correct, "needs", lambda _: ())({}))
    made.needs = lambda _: _READ | also | (frozenset() if own_needs is None else own_needs(options))
    made.gives_importance = lambda _: True
    made.keywords = options
    return corrected


def check_importance(estimator: Any, loss: Any) -> None:
    """Refuse a loss that would leave out importance weights that an estimator says it gives; see `Correction.check_loss`."""
    gives = getattr(estimator, "gives_importance", lambda options: False)
    if gives(getattr(estimator, "keywords", {})):
        _check_weighs(loss)


def _check_weighs(loss: Any) -> None:
    if not getattr(loss, "weighs_importance", False):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise PluginError(
            f"slime.losses: {name!r} does not apply the importance weights that the estimator gives; make it by "
            "`slime_algos.decorators.objective.policy_objective`, or multiply each token's policy loss by `view.importance` and "
            "set the function's attribute `weighs_importance` to True"
        )
