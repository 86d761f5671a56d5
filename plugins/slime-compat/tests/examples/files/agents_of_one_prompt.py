"""Solvers and a rewriter for one prompt: several training samples of one execution."""

import random

from agents_system import run_agent_system  # noqa: F401  # found by its path below
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

MULTI_AGENT_CONFIGS = {
    "custom_multi_agent_function_path": "agents_system.run_agent_system",
    "num_parallel": 2,
    "incorrect_reward_weight": 0.5,
    "correct_reward_weight": 2.0,
}


async def generate_with_multi_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    max_context_length = args.rollout_max_context_len if not evaluation else args.eval_max_context_len
    args.sampling_params = sampling_params
    args.rollout_max_context_len = max_context_length
    args.tokenizer = tokenizer
    for key, value in MULTI_AGENT_CONFIGS.items():
        setattr(args, key, value)
    custom_multi_agent_func = load_function(args.custom_multi_agent_function_path)
    samples = await custom_multi_agent_func(args, sample)
    random.shuffle(samples)
    return samples
