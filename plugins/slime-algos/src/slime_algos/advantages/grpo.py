"""Group-relative policy optimisation: a response's normalised reward, credited to each of its tokens."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="group-norm")
def grpo(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a sample the sample's group-normalised reward; returns are the same.

    Options of the normalisation are those of the reward transform `group-norm`: without the standard deviation
    it is Dr. GRPO (arXiv 2503.20783).

    Args:
        view: reads `rewards`, `sample_of_token`, `offsets`.
        kl: [T] penalty of each token, credited as `outcome` says.

    Returns:
        (advantages [T], returns [T]), without gradient.

    Source: GRPO with outcome supervision, arXiv 2402.03300, section 4.1.2.
    """
    return outcome(view, view.rewards, kl)
