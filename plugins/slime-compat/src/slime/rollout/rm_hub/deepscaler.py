"""DeepScaleR's reward."""

from slime_compat.views.samples.grading import score


def get_deepscaler_rule_based_reward(response: str, label: str) -> float:
    """Return 1.0 where the box after the thought is the label, else 0.0."""
    return score("deepscaler", response, label)


__all__ = ["get_deepscaler_rule_based_reward"]
