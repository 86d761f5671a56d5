"""Generate functions of two turns, between and within which an asynchronous run updates its weights."""

import aiohttp
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def appending(args, sample, sampling_params):
    """Append each answer with what the engine said of it."""
    sample.tokens = [1]
    for _ in range(2):
        output = await _ask_here(args, sample.tokens, sampling_params)
        log_probs, ids = _pairs(output)
        sample.append_response_tokens(
            args, tokens=ids, log_probs=log_probs, meta_info=output["meta_info"], text=output["text"]
        )
    return sample


async def by_hand(args, sample, sampling_params):
    """Write the fields oneself."""
    return await _two_turns(args, sample, sampling_params, _ask_here)


async def by_hand_with_versions(args, sample, sampling_params):
    """Write the fields oneself, and the versions that answers name."""
    await _two_turns(args, sample, sampling_params, _ask_here, versions=sample.weight_versions)
    return sample


async def by_another_client(args, sample, sampling_params):
    """Write the fields oneself, and ask by a client of one's own."""
    return await _two_turns(args, sample, sampling_params, _ask_by_aiohttp)


async def _two_turns(args, sample, sampling_params, ask, *, versions=None):
    prompt, response, log_probs = [1], [], []
    for _ in range(2):
        output = await ask(args, prompt + response, sampling_params)
        found, ids = _pairs(output)
        response, log_probs = response + ids, log_probs + found
        if versions is not None:
            versions.append(output["meta_info"]["weight_version"])
    sample.tokens, sample.response_length = prompt + response, len(response)
    sample.rollout_log_probs, sample.status = log_probs, Sample.Status.COMPLETED
    return sample


def _pairs(output):
    pairs = output["meta_info"]["output_token_logprobs"]
    return [log_prob for log_prob, *_ in pairs], [token for _, token, *_ in pairs]


def _payload(args, ids, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    return url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}


async def _ask_here(args, ids, sampling_params):
    return await post(*_payload(args, ids, sampling_params))


async def _ask_by_aiohttp(args, ids, sampling_params):
    url, payload = _payload(args, ids, sampling_params)
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
        response.raise_for_status()
        return await response.json()
