"""On-policy distillation from a server: the teacher's log-probs of a response, asked for where rewards are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.errors import RewardError

from slime_compat.views.generating.processing import encode_image_for_rollout_engine
from slime_compat.views.running.http import post
from slime_compat.views.samples.sample import ReferenceSample as Sample


async def reward_func(args: Any, sample: Sample, **_: Any) -> float:
    """Give a sample the teacher's log-probs of its response, by `--rm-url`; returns the reward 0.

    Raises:
        RewardError: there is no `--rm-url`, or it did not answer with a log-prob for each token.
    """
    if not args.rm_url:
        raise RewardError(
            "on_policy_distillation.reward_func: found no --rm-url; wanted the teacher's address, http://HOST:PORT/generate"
        )
    told = await post(args.rm_url, _request(sample))
    rows = told.get("meta_info", {}).get("input_token_logprobs") if isinstance(told, dict) else None
    if not rows or len(rows) < len(sample.tokens):
        raise RewardError(
            f"{sample.name}: {args.rm_url} answered with {len(rows or [])} log-probs for {len(sample.tokens)} tokens; "
            "wanted meta_info.input_token_logprobs, as SGLang gives it"
        )
    n = sample.response_length
    sample.teacher_log_probs = [float(row[0]) for row in rows[len(rows) - n :]]
    return 0.0


def post_process_rewards(args: Any, samples: Sequence[Sample], **_: Any) -> tuple[list[float], list[float]]:
    """Return (raw rewards, rewards), all 0: what is learned is how far log-probs are from the teacher's."""
    nothing = [0.0] * len(samples)
    return nothing, nothing


def _request(sample: Sample) -> dict[str, Any]:
    request: dict[str, Any] = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    images = (sample.multimodal_inputs or {}).get("images")
    if images:
        request["image_data"] = [
            one if isinstance(one, str) else encode_image_for_rollout_engine(one) for one in images
        ]
    return request
