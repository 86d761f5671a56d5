"""On-policy distillation: the teacher's answer is the reward, and its log-probs are taken out afterwards."""

import aiohttp
import torch
from slime.utils.types import Sample


async def reward_func(args, sample, **kwargs):
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with aiohttp.ClientSession() as session, session.post(args.rm_url, json=payload) as resp:
        resp.raise_for_status()
        return await resp.json()


def post_process_rewards(args, samples: list[Sample], **kwargs):
    raw_rewards = [sample.get_reward_value(args) for sample in samples]
    for sample, reward in zip(samples, raw_rewards, strict=False):
        rows = reward["meta_info"]["input_token_logprobs"][1:]
        log_probs = torch.tensor([item[0] for item in rows], dtype=torch.float32)
        sample.teacher_log_probs = log_probs[-sample.response_length :]
    scalar_rewards = [0.0] * len(samples)
    return scalar_rewards, scalar_rewards
