"""`Correction`: importance weights and token masks that an estimator returns if engine and trainer differ (off-policy)."""

from __future__ import annotations

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
