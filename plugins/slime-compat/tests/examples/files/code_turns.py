"""A code tool between turns, token by token, as users of a tool example write it today."""

from typing import Any

try:
    from jinja2 import Template
except ImportError as e:
    raise ImportError("Jinja2 is required.") from e

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

try:
    from slime.rollout.rm_hub.math_dapo_utils import compute_score as math_dapo_compute_score
except ImportError as e:
    raise ImportError("MathDapo is not installed") from e

TOOL_CONFIGS = {"max_turns": 4, "max_tool_calls": 2}
TEMPLATE = "{%- for message in messages %}{{- message['content'] }}{%- endfor %}"


def format_conversation(prompt: str, tools: list[dict[str, Any]]) -> str:
    return Template(TEMPLATE).render(messages=[{"role": "user", "content": prompt}], tools=tools)


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    sample.rollout_log_probs = None
    sample.rollout_top_p_token_ids = None
    sample.rollout_top_p_token_offsets = None
    sample.response, sample.response_length, sample.loss_mask = "", 0, []
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = format_conversation(sample.prompt, tools=[])
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response, response_ids, loss_masks, tool_call_count = "", [], sample.loss_mask, 0
    if args.rollout_max_context_len is not None:
        max_context_length = args.rollout_max_context_len
    else:
        max_context_length = args.context_parallel_size * args.max_tokens_per_gpu
    for _turn in range(TOOL_CONFIGS["max_turns"]):
        total = len(prompt_ids) + len(response_ids)
        if total >= max_context_length:
            sample.status = Sample.Status.TRUNCATED
            break
        params = dict(sampling_params)
        params["max_new_tokens"] = min(sampling_params.get("max_new_tokens", 1), max_context_length - total)
        output = await post(
            url, {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True}
        )
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += state.tokenizer.decode(ids)
        response_ids += ids
        log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        sample.append_response_tokens(
            args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=output["meta_info"]
        )
        if tool_call_count >= TOOL_CONFIGS["max_tool_calls"]:
            break
        tool_call_count += 1
        seen = state.tokenizer("q", add_special_tokens=False)["input_ids"]
        response_ids += seen
        sample.append_response_tokens(args, tokens=seen, trainable=False)
        assert len(response_ids) == len(sample.rollout_log_probs) == len(sample.loss_mask)
        response += "q"
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.payload_text = prompt + response
    sample.tool_call_count = tool_call_count
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    result = math_dapo_compute_score(
        sample.prompt + sample.response, sample.label or "", strict_box_verify=True
    )
    num_turns = getattr(sample, "tool_call_count", 0)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (num_turns - 2) / 2 * 0.1)
    if result["pred"] is None:
        result["pred"] = ""
    return result
