"""Search between turns, over text: what a user who began with a search example has."""

import asyncio

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIGS = {"max_turns": 3, "topk": 2, "search_concurrency": 8, "return_logprob": False}
SEMAPHORE = asyncio.Semaphore(CONFIGS["search_concurrency"])
PASSAGES = {"a": "bc", "b": "cd", "c": "de"}


async def search(query):
    async with SEMAPHORE:
        await asyncio.sleep(0)
        return "".join(PASSAGES.get(letter, "z") for letter in query)[: CONFIGS["topk"]]


async def execute(prediction):
    if "x" in prediction or not prediction:
        return "", True
    return await search(prediction[-1]), False


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function at the moment."
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = sample.prompt
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask = "", [], []
    for _turn in range(CONFIGS["max_turns"]):
        output = await post(url, {"text": prompt + response, "sampling_params": sampling_params})
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        text = output["text"]
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        response += text
        response_ids += ids
        loss_mask += [1] * len(ids)
        if output["meta_info"]["finish_reason"]["type"] == "length" and _turn == CONFIGS["max_turns"] - 1:
            break
        observation, done = await execute(text)
        if done:
            break
        ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        response_ids += ids
        loss_mask += [0] * len(ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.prompt = prompt
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return float(sample.label in sample.response)
