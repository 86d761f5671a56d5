"""The default rollout, and its parts."""

from slime_compat.views.generating.generate_state import GenerateState
from slime_compat.views.generating.rollout import (
    abort,
    eval_rollout,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
    get_model_url,
)
from slime_compat.views.running.absent import lacking

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]
_SETS = "evaluation sets are the run's; use eval_rollout(args, rollout_id), or --eval-config"
__getattr__ = lacking(__name__, dict.fromkeys(("EVAL_PROMPT_DATASET", "eval_rollout_single_dataset"), _SETS))
