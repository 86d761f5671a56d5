"""The default rollout as a user has changed it: a loop over what is pending, a filter, and an abort of the rest."""

import asyncio

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.sglang_rollout import GenerateState, abort
from slime.utils.async_utils import run
from slime.utils.misc import load_function


async def generate_rollout_async(args, rollout_id, data_source):
    assert args.rollout_global_dataset
    state = GenerateState(args)
    path = args.dynamic_sampling_filter_path
    dynamic_filter = load_function(path) if path is not None else None
    gatherer, target, data, seen = MetricGatherer(), args.rollout_batch_size, [], 0
    while len(data) < target:
        while state.remaining_batch_size < target:
            state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            assert len(group) == args.n_samples_per_prompt
            seen += 1
            told = call_dynamic_filter(dynamic_filter, args, group)
            if not told.keep:
                gatherer.on_dynamic_filter_drop(reason=told.reason)
                state.remaining_batch_size -= 1
                continue
            if len(data) < target:
                data.append(group)
    aborted = await abort(args, rollout_id)
    assert not state.pendings and state.aborted
    data = sorted(data, key=lambda group: group[0].index)
    state.reset()
    return RolloutFnTrainOutput(samples=data, metrics={**gatherer.collect(), "rollout/seen": seen}), aborted


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not evaluation
    output, aborted = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    data_source.add_samples(aborted)
    return output
