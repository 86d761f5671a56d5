"""Generators that do what no generator should. Each is chosen by its name: `hostile_generators:NAME`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.samples import Sample, Status


async def reward(sample):
    """Async, so that no process is started for it."""
    return float(len(sample.response))


# What they raise.


async def raises_an_error(ctx, sample, params):
    raise ZeroDivisionError("of its own")


async def exits_with_0(ctx, sample, params):
    sys.exit(0)


async def raises_keyboard_interrupt(ctx, sample, params):
    raise KeyboardInterrupt


async def raises_a_base_exception(ctx, sample, params):
    raise type("Own", (BaseException,), {})("no Exception")


async def raises_cancelled(ctx, sample, params):
    raise asyncio.CancelledError


async def raises_stop_iteration(ctx, sample, params):
    raise StopAsyncIteration


async def raises_generator_exit(ctx, sample, params):
    raise GeneratorExit


async def raises_without_text(ctx, sample, params):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    raise Mute


async def raises_a_group(ctx, sample, params):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raises_an_error(ctx, sample, params))


async def recurses(ctx, sample, params):
    return await recurses(ctx, sample, params)


async def runs_out_of_memory(ctx, sample, params):
    return [0] * (1 << 60)


async def fails_to_import(ctx, sample, params):
    import no_such_module  # noqa: F401


# What they return.


def is_not_async(ctx, sample, params):
    return sample


async def yields(ctx, sample, params):
    yield sample


async def returns_none(ctx, sample, params):
    await single_turn(ctx, sample, params)


async def returns_text(ctx, sample, params):
    return "abc"


async def returns_ids(ctx, sample, params):
    return [1, 2, 3]


async def returns_nothing(ctx, sample, params):
    return []


async def returns_a_tuple(ctx, sample, params):
    return (await single_turn(ctx, sample, params),)


async def returns_the_class(ctx, sample, params):
    return Sample


async def returns_one_twice(ctx, sample, params):
    sample.rollout_id = sample.index
    return [await single_turn(ctx, sample, params)] * 2


async def fans_out_without_an_id(ctx, sample, params):
    done = await single_turn(ctx, sample, params)
    return [done, copy.deepcopy(done)]


async def returns_it_pending(ctx, sample, params):
    return sample


def altered(change):
    """Return a generator that generates as `single-turn` does, and then changes the sample."""

    async def generate(ctx, sample, params):
        done = await single_turn(ctx, sample, params)
        change(done)
        return done

    return generate


def setting(**values):
    return altered(lambda sample: [setattr(sample, name, value) for name, value in values.items()])


mask_of_nan = setting(loss_mask=[float("nan")])
mask_of_minus_one = setting(loss_mask=[-1])
mask_of_two = setting(loss_mask=[2])
mask_of_floats = setting(loss_mask=[1.0])
mask_of_text = setting(loss_mask=["1"])
mask_too_long = setting(loss_mask=[1, 1])
mask_is_an_array = setting(loss_mask=np.ones(1))
ids_of_floats = altered(lambda sample: sample.tokens.__setitem__(-1, 1.7))
ids_as_text = altered(lambda sample: sample.tokens.__setitem__(-1, "7"))
ids_of_bools = altered(lambda sample: sample.tokens.__setitem__(-1, True))
ids_below_zero = altered(lambda sample: sample.tokens.__setitem__(-1, -1))
ids_beyond_the_vocabulary = altered(lambda sample: sample.tokens.__setitem__(-1, 27))
ids_beyond_64_bits = altered(lambda sample: sample.tokens.__setitem__(-1, 1 << 70))
another_prompt = altered(lambda sample: sample.tokens.__setitem__(0, (sample.tokens[0] + 1) % 26))
longer_prompt = altered(lambda sample: sample.tokens.insert(0, 1))
another_index = setting(index=7_000)
another_group = setting(group_index=None)
another_label = setting(label="y")
another_text_of_the_prompt = setting(prompt="zzz")
log_prob_of_nan = setting(rollout_log_probs=[float("nan")])
log_prob_of_minus_infinity = setting(rollout_log_probs=[float("-inf")])
log_prob_above_zero = setting(rollout_log_probs=[0.5])
log_probs_too_many = setting(rollout_log_probs=[-0.5, -0.5])
log_probs_of_lists = setting(rollout_log_probs=[[-0.5]])
versions_of_ints = setting(weight_versions=[1])
status_as_text = setting(status="completed")
status_of_another_kind = setting(status=3)
failed_without_a_reason = setting(status=Status.FAILED)
response_as_bytes = setting(response=b"a")
response_with_a_surrogate = setting(response="\ud800")
length_below_zero = setting(response_length=-1)
length_as_float = setting(response_length=1.0)
reward_of_nan = setting(reward=float("nan"))
reward_as_text = setting(reward="1")
reward_part_of_infinity = setting(reward={"score": float("inf")})
metadata_with_an_object = setting(metadata={"a": object()})
metadata_with_keys_of_tuples = setting(metadata={(1, 2): 3})
metadata_is_a_list = setting(metadata=[1])
counters_as_text = setting(spec_info={"spec_verify_ct": "x"})
counters_of_nan = setting(prefix_cache_info={"cached_tokens": float("nan")})
counters_below_zero = setting(spec_info={"spec_draft_token_num": -1})
an_id_for_all_executions = setting(rollout_id=-5)
timings_of_nan = setting(timings={"tool": float("nan")})
sampling_mask_beyond_the_vocabulary = setting(
    rollout_top_p_token_ids=[99], rollout_top_p_token_offsets=[0, 1]
)
sampling_mask_of_floats = setting(rollout_top_p_token_ids=[0.5], rollout_top_p_token_offsets=[0, 1])
sampling_mask_offsets_that_fall = setting(rollout_top_p_token_ids=[], rollout_top_p_token_offsets=[0, 0, 0])
routes_of_two_dimensions = setting(rollout_routed_experts=np.zeros((1, 2), dtype=int))
removed_as_text = setting(remove_sample="no")
tokens_are_an_array = altered(lambda sample: setattr(sample, "tokens", np.array(sample.tokens)))


@altered
def metadata_within_itself(sample):
    sample.metadata["self"] = sample.metadata


@altered
def response_too_long(sample):
    sample.append_response([0] * 50, log_probs=[-0.5] * 50, finish_reason="stop")


# What they do to the event loop, and to the process.


async def swallows_cancellation(ctx, sample, params):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)


async def swallows_everything(ctx, sample, params):
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(1e6)


async def blocks_by_sleeping(ctx, sample, params):
    while True:
        time.sleep(0.1)


async def blocks_by_computing(ctx, sample, params):
    while True:
        sum(range(1000))


async def holds_the_interpreter(ctx, sample, params):
    ctypes.PyDLL(None).sleep(10_000)


async def stops_the_loop(ctx, sample, params):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(1e6)


async def exits_in_a_task(ctx, sample, params):
    async def leave():
        sys.exit(0)

    await asyncio.wait([asyncio.create_task(leave())])


async def cancels_all_tasks(ctx, sample, params):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1e6)


async def leaks_tasks(ctx, sample, params):
    sample.leak = [asyncio.create_task(swallows_cancellation(ctx, sample, params)) for _ in range(3)]
    raise ZeroDivisionError("and leaves tasks behind")


async def leaks_a_thread(ctx, sample, params):
    threading.Thread(target=time.sleep, args=(10_000,)).start()
    raise ZeroDivisionError("and leaves a thread behind")


async def leaks_processes(ctx, sample, params):
    subprocess.Popen(["sleep", "9871"])
    subprocess.Popen(["setsid", "sleep", "9871"])
    subprocess.Popen(["sh", "-c", "setsid sleep 9871 & setsid sleep 9871 & exit"]).wait()
    raise ZeroDivisionError("and leaves processes behind")


async def closes_the_engine(ctx, sample, params):
    engine = ctx.engine
    while not hasattr(engine, "close"):  # what stands before it
        engine = vars(engine).get("engine") or engine._engine
    await engine.close()
    raise ZeroDivisionError("after it closed the engine")


async def closes_the_streams(ctx, sample, params):
    sys.stdout.close()
    sys.stderr.close()
    raise ZeroDivisionError("after it closed the streams")


async def changes_the_folder(ctx, sample, params):
    os.chdir("/")
    raise ZeroDivisionError("after it changed the folder")


async def breaks_json(ctx, sample, params):
    import json

    json.dumps = None
    raise ZeroDivisionError("after it broke json")


async def raises_the_fence(ctx, sample, params):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    sys.setrecursionlimit(10**6)
    raise ZeroDivisionError("after it changed the interpreter")
