"""The agents: each asks the server by itself."""

import asyncio
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate_response(args, prompt, key):
    sampling_params = args.sampling_params
    sample = deepcopy(args.sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.prompt = prompt_ids, prompt
    params = deepcopy(sampling_params)
    params["max_new_tokens"] = min(
        sampling_params["max_new_tokens"], args.rollout_max_context_len - len(prompt_ids)
    )
    if params["max_new_tokens"] <= 0:
        return None
    output = await post(url, {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True})
    new_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    sample.tokens = sample.tokens + new_ids
    sample.response_length += len(new_ids)
    sample.response = output["text"]
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    sample.agent = key
    args.results_dict[key].append(sample)
    return output["text"]


async def run_agent_system(args, sample):
    args = deepcopy(args)
    args.sample = sample
    args.results_dict = {"solver": [], "rewriter": []}
    tasks = [generate_response(args, sample.prompt, "solver") for _ in range(args.num_parallel)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [one for one in answers if isinstance(one, str)]
    await generate_response(args, sample.prompt + "".join(answers)[:2], "rewriter")
    for key in ("solver", "rewriter"):
        rewards = await batched_async_rm(args, args.results_dict[key])
        for one, reward in zip(args.results_dict[key], rewards, strict=False):
            weight = args.correct_reward_weight if key == "rewriter" else args.incorrect_reward_weight
            one.reward = reward * weight
    return args.results_dict["solver"] + args.results_dict["rewriter"]
