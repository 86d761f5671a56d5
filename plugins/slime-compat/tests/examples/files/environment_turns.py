"""Turns with an environment of a module that the run's own configuration names."""

import importlib

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.processing_utils import encode_image_for_rollout_engine
from slime.utils.types import Sample


def _append(sample, tokens, log_probs, loss_mask_val, meta_info=None):
    sample.append_response_tokens(
        None, tokens=tokens, log_probs=log_probs, trainable=loss_mask_val == 1, meta_info=meta_info
    )


def _budget(sample, args, sampling_params):
    budgets = [sampling_params["max_new_tokens"] - sample.response_length]
    context_len = getattr(args, "rollout_max_context_len", None)
    if context_len is not None:
        budgets.append(int(context_len) - len(sample.tokens))
    return min(budgets)


async def generate(args, sample: Sample, sampling_params) -> Sample:
    module = importlib.import_module(args.rollout_interaction_env_path)
    if args.max_turns is None:
        raise ValueError("max_turns must be set via --custom-config-path in the custom config file.")
    env = module.build_env(sample=sample, args=args)
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sampling_params = sampling_params.copy()
    images = [
        encode_image_for_rollout_engine(one) for one in (sample.multimodal_inputs or {}).get("images") or []
    ]
    if not sample.tokens:
        sample.tokens = list(state.tokenizer.encode(sample.prompt, add_special_tokens=False))
    sample.loss_mask = sample.loss_mask or []
    sample.rollout_log_probs = sample.rollout_log_probs or []
    budget = _budget(sample, args, sampling_params)
    try:
        env.reset()
        for turn in range(args.max_turns):
            payload = {
                "input_ids": sample.tokens,
                "sampling_params": sampling_params | {"max_new_tokens": min(1, budget)},
                "return_logprob": True,
            }
            if images:
                payload["image_data"] = images
            output = await post(url, payload)
            meta = output["meta_info"]
            pairs = meta["output_token_logprobs"]
            _append(sample, [item[1] for item in pairs], [item[0] for item in pairs], 1, meta)
            budget -= len(pairs)
            observation, done, _ = env.step(output["text"])
            if done or turn + 1 == args.max_turns:
                sample.status = Sample.Status.COMPLETED
                break
            ids = state.tokenizer.encode(
                env.format_observation(observation)["content"], add_special_tokens=False
            )
            _append(sample, ids, [0.0] * len(ids), 0)
            budget -= len(ids)
            if budget <= 0:
                sample.status = Sample.Status.TRUNCATED
                break
        sample.response = state.tokenizer.decode(
            sample.tokens[-sample.response_length :], skip_special_tokens=False
        )
        return sample
    finally:
        env.close()
