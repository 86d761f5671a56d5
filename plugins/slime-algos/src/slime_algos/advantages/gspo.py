"""The estimator `gspo`: GRPO's advantages, trained with the loss whose ratio is per sample."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="group-norm", loss="gspo_loss")
def gspo(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Credit tokens as `grpo` does; the loss is `gspo_loss` unless another is named.

    Source: GSPO, arXiv 2507.18071.
    """
    return outcome(view, view.rewards, kl)
