"""A pool of groups that are generated in a thread with an event loop of its own, over the steps of a run."""

import asyncio
import queue
import threading

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import load_function
from slime.utils.types import Sample

_WORKERS = {}


class Worker:
    """Keeps some groups in flight."""

    def __init__(self, args, data_buffer, concurrency):
        self.args, self.data_buffer, self.concurrency = args, data_buffer, concurrency
        self.output_queue = queue.Queue(maxsize=1000)
        self.state = GenerateState(args)
        self.running = True
        self.thread = threading.Thread(target=lambda: asyncio.run(self._loop()), daemon=True)

    async def _loop(self):
        active = set()
        while self.running:
            active = {task for task in active if not task.done()}
            while len(active) + self.output_queue.qsize() < self.concurrency and self.running:
                for group in self.data_buffer.get_samples(1):
                    params = self.state.sampling_params.copy()
                    task = asyncio.create_task(
                        generate_and_rm_group(self.args, group, sampling_params=params, evaluation=False)
                    )
                    task.add_done_callback(self._done)
                    active.add(task)
            await asyncio.sleep(0.01)
        await asyncio.gather(*active)

    def _done(self, task):
        group = task.result()
        if any(one.status == Sample.Status.ABORTED for one in group):
            self.data_buffer.add_samples([group])
            return
        self.output_queue.put(group)


async def _collect(args, rollout_id, data_buffer):
    assert args.rollout_global_dataset
    key = args.run_name
    if key not in _WORKERS:
        concurrency = min(6, args.sglang_server_concurrency * get_rollout_num_engines(args))
        _WORKERS[key] = Worker(args, data_buffer, concurrency)
        _WORKERS[key].thread.start()
    worker, gatherer, groups = _WORKERS[key], MetricGatherer(), []
    path = args.dynamic_sampling_filter_path
    dynamic_filter = load_function(path) if path is not None else None
    while len(groups) < args.rollout_batch_size:
        try:
            group = worker.output_queue.get_nowait()
        except queue.Empty:
            await asyncio.sleep(0.01)
            continue
        told = call_dynamic_filter(dynamic_filter, args, group)
        if not told.keep:
            gatherer.on_dynamic_filter_drop(reason=told.reason)
            continue
        groups.append(group)
    if rollout_id == args.num_rollout - 1:
        worker.running = False
    return RolloutFnTrainOutput(
        samples=sorted(groups, key=lambda group: group[0].index), metrics=gatherer.collect()
    )


def generate_rollout_fully_async(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        raise ValueError("Evaluation mode is not supported")
    return run(_collect(args, rollout_id, data_buffer))
