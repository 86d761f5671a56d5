"""Formulae of losses."""

from slime_compat.views.running.absent import lacking
from slime_compat.views.training.formulae import (
    compute_approx_kl,
    compute_gspo_kl,
    compute_policy_loss,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
)
from slime_compat.views.training.logits import (
    calculate_log_probs_and_entropy,
    compute_entropy_from_logits,
    compute_log_probs,
)

__all__ = [
    "calculate_log_probs_and_entropy",
    "compute_approx_kl",
    "compute_entropy_from_logits",
    "compute_gspo_kl",
    "compute_log_probs",
    "compute_policy_loss",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
]
__getattr__ = lacking(
    __name__,
    {
        "compute_opsm_mask": "it is the trainer's; use --use-opsm",
        "get_reinforce_plus_plus_returns": "it is an estimator; use --advantage-estimator reinforce_plus_plus",
        "get_advantages_and_returns": "it is an estimator; use --advantage-estimator ppo",
        "get_advantages_and_returns_batch": "it is an estimator; use --advantage-estimator ppo",
    },
)
