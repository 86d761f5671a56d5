"""An estimator, a loss and a correction of one's own.

slime train RECIPE --custom-advantage-function-path docs.examples.own_algorithm:uneven
    --custom-loss-function-path docs.examples.own_algorithm:quadratic
    --custom-tis-function-path docs.examples.own_algorithm:near
"""

import torch
from slime_algos.decorators.estimator import estimator
from slime_algos.decorators.objective import policy_objective
from slime_algos.terms.ratio import importance_ratio
from slime_core.protocols.correction import Correction


@estimator(reward_transform="group-norm")
def uneven(view, kl, *, negative: float = 0.5):
    """Give each token its sample's reward, that of a sample below its group's mean only `negative` times."""
    rewards = torch.where(view.rewards < 0, negative * view.rewards, view.rewards)
    advantages = rewards[view.sample_of_token] - kl
    return advantages, advantages


@policy_objective
def quadratic(view, log_ratio, advantages, *, width: float = 0.2):
    """Take, per token, |A|·(ρ − 1)²/(2·width) − ρ·A: a penalty in the place of clipping (SPO, arXiv 2401.16025)."""
    ratio = importance_ratio(log_ratio)
    penalty = advantages.abs() * (ratio - 1).square() / (2 * width)
    return penalty - ratio * advantages, {"spo_penalty": penalty.detach()}


def near(view, *, most: float = 1.0):
    """Reject tokens whose log-probs in trainer and engine are more than `most` nats apart."""
    kept = (view.old_log_probs - view.rollout_log_probs).abs() <= most
    trained = view.loss_mask.sum().clamp(min=1)
    return Correction(kept=kept), {"near_rejected": (view.loss_mask * ~kept).sum() / trained}
