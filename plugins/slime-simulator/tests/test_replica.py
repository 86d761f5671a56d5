"""A replica's schedule: exact times worked by hand, and beside a reference that takes every decode step by itself."""

from __future__ import annotations

import asyncio
import random

import pytest
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_simulator.costs.costs import EngineCosts
from slime_simulator.parts.replica import SimulatedReplica, SimulatedRequest


async def answered(replica, left, *, context=0, at=0.0):
    """Submit a request at a time; returns (tokens, finish reason, when it was answered)."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at)
    answer = loop.create_future()
    replica.submit(
        SimulatedRequest(left, context, lambda _, tokens, reason: answer.set_result((tokens, reason)))
    )
    tokens, reason = await answer
    return tokens, reason, loop.time()


def answers(costs, requests):
    """Return what `answered` says of (tokens, context, time of arrival) each, on one replica."""

    async def work():
        replica = SimulatedReplica(costs)
        return await asyncio.gather(*(answered(replica, n, context=c, at=t) for n, c, t in requests))

    return run_in_virtual_time(work())[0]


def times(costs, requests):
    return [when for _, _, when in answers(costs, requests)]


def test_requests_share_decode_steps():
    """Two steps of 1 + 2 x 0.5 s for both, then one of 1.5 s for who is left."""
    costs = EngineCosts(step_s=1.0, request_s=0.5)
    assert times(costs, [(3, 0, 0.0), (2, 0, 0.0)]) == pytest.approx([5.5, 4.0])


def test_the_kv_cache_grows_with_every_step():
    """Prefill of 10 tokens, 0.1 s, then steps over 10, 11 and 12 tokens: 2.0 + 2.1 + 2.2 s."""
    costs = EngineCosts(step_s=1.0, kv_token_s=0.1, prefill_token_s=0.01)
    assert times(costs, [(3, 10, 0.0)]) == pytest.approx([6.4])


def test_who_arrives_within_a_step_is_admitted_at_its_end_and_its_prefill_holds_up_the_others():
    """One step alone (1 s), a prefill of 5 s, then three steps together; the fourth of the second one alone."""
    costs = EngineCosts(step_s=1.0, prefill_token_s=0.5)
    assert times(costs, [(4, 0, 0.0), (4, 10, 0.5)]) == pytest.approx([9.0, 10.0])


def test_without_a_slot_requests_wait_in_the_order_of_their_arrival():
    costs = EngineCosts(step_s=1.0, slots=1)
    assert times(costs, [(3, 0, 0.0), (5, 0, 0.0), (1, 0, 1.0)]) == pytest.approx([3.0, 8.0, 9.0])


def test_an_abort_answers_with_the_tokens_of_whole_steps():
    async def work():
        replica = SimulatedReplica(EngineCosts(step_s=1.0, slots=1))
        tasks = [asyncio.create_task(answered(replica, n)) for n in (10, 10)]
        await asyncio.sleep(3.5)
        replica.abort()
        return await asyncio.gather(*tasks), replica

    (found, replica), _ = run_in_virtual_time(work())
    assert found == [(3, "abort", 3.5), (0, "abort", 3.5)]
    assert (replica.tokens, replica.busy_s, replica.pending) == (3, 3.5, 0)


@pytest.mark.parametrize(("recompute", "end"), [(False, 14.0), (True, 15.35)])
def test_a_pause_stops_within_a_step_and_recomputing_is_a_prefill_of_what_is_in_flight(recompute, end):
    """Paused at 3.5 s for 10 s; of its 4 s half a second is left. 3 tokens are generated, on a context of 24: 27 x 0.05 s."""

    async def work():
        replica = SimulatedReplica(EngineCosts(step_s=1.0, prefill_token_s=0.05))
        task = asyncio.create_task(answered(replica, 4, context=24))
        await asyncio.sleep(3.5 + 24 * 0.05)
        replica.pause()
        await asyncio.sleep(10.0)
        replica.resume(recompute=recompute)
        return await task

    (_, _, when), _ = run_in_virtual_time(work())
    assert when - 24 * 0.05 == pytest.approx(end)


@pytest.mark.parametrize(("pause", "end"), [(0.0, 6.0), (10.0, 16.0)])
def test_a_replica_goes_on_where_it_was_with_other_costs(pause, end):
    """At 2 s a second of prefill is left, which takes half of one: step 1 is over at 3.5 s, and half of step 2 at 4 s. At 2 s a
    step the other half takes until 5 s, and step 3 a second at the old speed.
    """
    slow = EngineCosts(step_s=2.0, prefill_token_s=0.05)

    async def work():
        replica = SimulatedReplica(EngineCosts(step_s=1.0, prefill_token_s=0.1))
        task = asyncio.create_task(answered(replica, 3, context=30))
        await asyncio.sleep(2.0)
        replica.change(EngineCosts(step_s=1.0, prefill_token_s=0.05))
        await asyncio.sleep(2.0)
        replica.change(slow)
        await asyncio.sleep(1.0)
        if pause:
            replica.pause()
        replica.change(EngineCosts(step_s=1.0))
        if pause:
            await asyncio.sleep(pause)
            replica.resume(recompute=False)
        return await task

    assert run_in_virtual_time(work())[0] == (3, "stop", pytest.approx(end))


def test_prefill_takes_the_tokens_that_are_to_be_prefilled():
    """The second request's 20 tokens are in the cache already: they count in it, and take no prefill."""
    costs = EngineCosts(step_s=1.0, kv_token_s=0.1, prefill_token_s=0.01)

    async def work():
        replica, ended = SimulatedReplica(costs), asyncio.get_running_loop().create_future()
        replica.submit(SimulatedRequest(1, 20, lambda *_: None))
        replica.submit(SimulatedRequest(1, 20, lambda *_: ended.set_result(None), prefill=0))
        await ended

    assert run_in_virtual_time(work())[1] == pytest.approx(20 * 0.01 + 1 + 40 * 0.1)


def by_single_steps(costs, requests):
    """Return the times of answers by taking one decode step after the other: the obvious way."""
    now, running, waiting = 0.0, [], sorted(range(len(requests)), key=lambda i: requests[i][2])
    left, kv, done = [n for n, _, _ in requests], [c for _, c, _ in requests], {}
    while len(done) < len(requests):
        if not running and requests[waiting[0]][2] > now:
            now = requests[waiting[0]][2]
        while waiting and len(running) < costs.slots and requests[waiting[0]][2] <= now + 1e-9:
            running.append(waiting.pop(0))
        now += costs.step_s + len(running) * costs.request_s + sum(kv[i] for i in running) * costs.kv_token_s
        for i in list(running):
            left[i] -= 1
            kv[i] += 1
            if not left[i]:
                running.remove(i)
                done[i] = now
    return [done[i] for i in range(len(requests))]


@pytest.mark.parametrize("seed", range(20))
def test_counted_steps_take_as_long_as_single_ones(seed):
    """Without prefill, in which arrivals would be seen earlier or later; arrivals never meet the end of a step exactly."""
    drawn = random.Random(seed)
    costs = EngineCosts(
        step_s=drawn.uniform(0.1, 1), request_s=drawn.choice([0, 0.1]), kv_token_s=drawn.choice([0, 0.003]),
        slots=drawn.randint(1, 6),
    )  # fmt: skip
    requests = [
        (drawn.randint(1, 40), drawn.randint(0, 20), drawn.choice([0.0, drawn.uniform(0, 60)]))
        for _ in range(25)
    ]
    assert times(costs, requests) == pytest.approx(by_single_steps(costs, requests), rel=1e-9)
