"""The estimator `cispo`: GRPO's advantages, trained with the loss that clips importance weights."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="group-norm", loss="cispo_loss")
def cispo(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Credit tokens as `grpo` does; the loss is `cispo_loss` unless another is named.

    Source: MiniMax-M1, arXiv 2506.13585.
    """
    return outcome(view, view.rewards, kl)
