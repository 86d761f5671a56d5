"""Logits and log-probs of a custom loss, the policy's loss, and corrections."""

from slime_compat.views.running.absent import lacking
from slime_compat.views.training.corrections import icepop_function, vanilla_tis_function
from slime_compat.views.training.logits import get_log_probs_and_entropy, get_responses
from slime_compat.views.training.policy import policy_loss_function, sft_loss_function

__all__ = [
    "get_log_probs_and_entropy",
    "get_responses",
    "icepop_function",
    "policy_loss_function",
    "sft_loss_function",
    "vanilla_tis_function",
]
__getattr__ = lacking(
    __name__,
    {
        "get_values": "values are the critic's; use batch['values'], and --advantage-estimator ppo",
        "value_loss_function": "the critic has its own loss; use --value-clip",
        "loss_function": "losses are chosen by name; use --loss-type or --custom-loss-function-path",
        "compute_advantages_and_returns": "advantages are an estimator's; use --custom-advantage-function-path",
    },
)
