"""Formulae of losses."""

from slime_compat.views.running.absent import lacking
from slime_compat.views.training.formulae import (
    compute_approx_kl,
    compute_gspo_kl,
    compute_policy_loss,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
)

__all__ = [
    "compute_approx_kl",
    "compute_gspo_kl",
    "compute_policy_loss",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
]
_LOGITS = "a loss is given log-probs; use slime.backends.megatron_utils.loss.get_log_probs_and_entropy"
__getattr__ = lacking(
    __name__,
    {
        "calculate_log_probs_and_entropy": _LOGITS,
        "compute_log_probs": _LOGITS,
        "compute_entropy_from_logits": _LOGITS,
        "compute_opsm_mask": "it is the trainer's; use --use-opsm",
        "get_reinforce_plus_plus_returns": "it is an estimator; use --advantage-estimator reinforce_plus_plus",
        "get_advantages_and_returns": "it is an estimator; use --advantage-estimator ppo",
        "get_advantages_and_returns_batch": "it is an estimator; use --advantage-estimator ppo",
    },
)
