"""Rewards by the task that a row says it is of, and logs by task."""

import copy

from slime.rollout.rm_hub import async_rm
from slime.utils import logging_utils
from slime.utils.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
)
from slime.utils.types import Sample


async def route(args, sample: Sample, **kwargs):
    task = (sample.metadata or {}).get("rm_type", "f1")
    if task == "own":
        return float(sample.response == sample.label)
    own = copy.copy(args)
    own.custom_rm_path = None
    sample.metadata["rm_type"] = task
    reward = await async_rm(own, sample)
    return reward["score"] if isinstance(reward, dict) else reward


def log_eval(rollout_id, args, data, extra_metrics):
    told = dict(extra_metrics or {})
    for name, one in data.items():
        told |= dict_add_prefix(
            compute_statistics([s.effective_response_length for s in one["samples"]]), f"eval/{name}/len/"
        )
        told |= dict_add_prefix(
            compute_pass_rate(flat_rewards=one["rewards"], group_size=args.n_samples_per_eval_prompt),
            f"eval/{name}-own-",
        )
    told["eval/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, told, step_key="eval/step")
    return True
