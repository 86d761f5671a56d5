"""Loss masks of conversations."""

from slime_compat.views.samples.loss_masks import MultiTurnLossMaskGenerator

__all__ = ["MultiTurnLossMaskGenerator"]
