"""Whole rollouts and evaluations of a user, with the reference system's signatures."""

import asyncio
import copy

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import (
    GenerateState,
    eval_rollout,
    generate_and_rm_group,
)
from slime.rollout.sglang_rollout import (
    generate_rollout as default_rollout,
)
from slime.utils.async_utils import run
from slime.utils.types import Sample


async def _rollout(args, data_source):
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size)
    assert all(
        (isinstance(sample, Sample) and sample.tokens == []) or sample.tokens
        for group in groups
        for sample in group
    )
    tasks = [
        asyncio.create_task(
            generate_and_rm_group(args, group, state.sampling_params.copy(), evaluation=False)
        )
        for group in groups
    ]
    return list(await asyncio.gather(*tasks))


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """Generate the groups of a step, or evaluate as usual."""
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    groups = run(_rollout(args, data_source))
    for group in groups:
        for sample in group:
            sample.metadata["rollout_id"] = rollout_id
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/own_metric": float(len(groups))})


def bare_rollout(args, rollout_id, data_buffer, evaluation=False):
    """Return groups without an output around them, after the default rollout."""
    output = default_rollout(args, rollout_id, data_buffer, evaluation=evaluation)
    return output.samples


def buffering_rollout(args, rollout_id, data_source, evaluation=False):
    """Generate twice as much, and keep the rest for later."""
    assert not evaluation
    groups = run(_rollout(args, data_source)) + run(_rollout(args, data_source))
    rest = groups[args.rollout_batch_size :]
    fresh = []
    for group in rest:
        again = []
        for sample in group:
            one = copy.deepcopy(sample)
            one.tokens, one.response, one.response_length = one.tokens[:1], "", 0
            one.rollout_log_probs, one.loss_mask, one.reward = None, None, None
            one.weight_versions, one.weight_version_starts = [], []
            one.status = Sample.Status.PENDING
            again.append(one)
        fresh.append(again)
    data_source.add_samples(fresh)
    return RolloutFnTrainOutput(samples=groups[: args.rollout_batch_size])


def own_samples(args, rollout_id, data_source, evaluation=False):
    """Make samples of its own, as a rollout of supervised data does."""
    groups = []
    for number in range(args.rollout_batch_size):
        group = []
        for _ in range(args.n_samples_per_prompt):
            sample = Sample(prompt="a", tokens=[number, number + 1, 26], response_length=2)
            sample.response, sample.reward, sample.status = "b", 1.0, Sample.Status.COMPLETED
            sample.rollout_log_probs = None
            group.append(sample)
        groups.append(group)
    return groups


def eval_own(args, rollout_id, data_source, evaluation=False):
    """Evaluate on a set of its own."""
    assert evaluation
    samples = [
        Sample(index=i, prompt="a", tokens=[0, 1], response="b", response_length=1, reward=float(i % 2 == 0))
        for i in range(4)
    ]
    for sample in samples:
        sample.status = Sample.Status.COMPLETED
    data = {"own": {"rewards": [s.reward for s in samples], "truncated": [False] * 4, "samples": samples}}
    return RolloutFnEvalOutput(data=data, metrics={"eval/own/extra": 7.0})


def no_groups(args, rollout_id, data_source, evaluation=False):
    """Return nothing of use."""
    return 3
