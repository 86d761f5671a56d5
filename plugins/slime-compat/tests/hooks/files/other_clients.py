"""Generate functions that ask the server by clients of their own, and that make several samples of one."""

import asyncio
import copy

import aiohttp
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as one_turn
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def by_aiohttp(args, sample, sampling_params):
    """Post by aiohttp, with the prompt as text."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
        response.raise_for_status()
        output = await response.json()
    state = GenerateState(args)
    prompt_ids = state.tokenizer(sample.prompt)["input_ids"]
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [token for _, token, *_ in pairs]
    sample.response_length = len(pairs)
    sample.response = output["text"]
    sample.rollout_log_probs = [log_prob for log_prob, *_ in pairs]
    sample.status = Sample.Status.COMPLETED
    return sample


async def asks_too_much(args, sample, sampling_params):
    """Ask for what the engine does not have."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    return await post(url, {"input_ids": [1], "sampling_params": {"json_schema": "{}"}})


async def by_default(args, sample, sampling_params):
    """Do as the default does."""
    sampling_params = copy.deepcopy(sampling_params)
    sampling_params["max_new_tokens"] = 2
    return await one_turn(args, sample, sampling_params)


async def solver(args, sample, sampling_params):
    """Let three agents answer one prompt."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    async def agent(number):
        one = copy.deepcopy(sample)
        one.tokens = state.tokenizer.encode(one.prompt, add_special_tokens=False)
        async with state.semaphore:
            payload = {"input_ids": one.tokens, "sampling_params": sampling_params, "return_logprob": True}
            output = await post(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        one.append_response_tokens(
            tokens=[token for _, token, _ in pairs],
            log_probs=[log_prob for log_prob, _, _ in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        one.metadata["agent"] = number
        one.reward = float(number)
        return one

    made = await asyncio.gather(*(agent(number) for number in range(3)))
    for one in made:
        one.rollout_id = sample.index
    return list(made)
