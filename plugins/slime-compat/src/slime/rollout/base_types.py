"""What rollout and evaluation functions return."""

from slime_compat.views.samples.outputs import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_rollout_fn,
    iter_samples,
)

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn", "iter_samples"]
