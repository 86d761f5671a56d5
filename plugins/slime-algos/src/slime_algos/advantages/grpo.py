"""Group-relative policy optimisation: a response's normalised reward, credited to each of its tokens."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor


def grpo(view: TokenView) -> tuple[Tensor, Tensor]:
    """Give every token of a sample the sample's group-normalised reward; returns are the same.

    Args:
        view: reads `rewards` and `sample_of_token`.

    Returns:
        (advantages [T], returns [T]), float32, without gradient.

    Source: GRPO with outcome supervision, arXiv 2402.03300, section 4.1.2.
    """
    advantages: Tensor = view.rewards.detach().float()[view.sample_of_token]
    return advantages, advantages


grpo.reward_transform = "group-norm"  # type: ignore[attr-defined]  # mypy knows no attributes of functions
