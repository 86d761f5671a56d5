"""Rewards that a rollout function asks for, and those without a number."""

from __future__ import annotations

import asyncio
import types

import numpy as np
import pytest
from slime_compat.adapters.rewards import _numbered
from slime_compat.views.running.namespace import Args
from slime_compat.views.running.runtime import Runtime, using
from slime_compat.views.samples.grading import async_rm
from slime_compat.views.samples.sample import viewed
from slime_core.samples import Sample, Status


class Run:
    """Scores as a run does: in place."""

    scorer = object()

    def __init__(self, reward):
        self._reward = reward

    async def score(self, samples, *, evaluation=False):
        for sample in samples:
            self._reward(sample)


def scored(reward):
    """Return a sample that a rollout function has scored, and what it was told."""
    context = types.SimpleNamespace(evaluation=False)
    runtime = Runtime(args=Args(None), context=context, server=None, loop=None, run=Run(reward))

    async def scenario():
        sample = viewed(Sample(index=1, tokens=[1, 2, 3], response_length=2, status=Status.COMPLETED))
        sample.tool_call_count = 3
        sample.reward = 0.25
        with using(runtime):
            return sample, await async_rm(runtime.args, sample)

    return asyncio.run(scenario())


def test_a_reward_sees_the_sample_itself_and_what_it_writes_stays():
    def reward(sample):
        assert sample.reward is None
        sample.teacher_log_probs = [-0.5] * sample.response_length
        sample.reward = float(sample.tool_call_count)

    sample, told = scored(reward)
    assert (told, sample.reward, sample.teacher_log_probs) == (3.0, 0.25, [-0.5, -0.5])


def test_a_reward_that_failed_is_seen_in_the_samples_status():
    def reward(sample):
        sample.status = Status.FAILED

    sample, told = scored(reward)
    assert (told, sample.status) == (None, Status.FAILED)


@pytest.mark.parametrize("number", [1.0, np.float32(1.0)])
def test_a_number_of_any_kind_is_a_reward_beside_a_post_processing(number):
    args, sample = Args(None), viewed(Sample(index=1))
    args.custom_reward_post_process_path, args.reward_key = "x:y", "acc"
    assert _numbered(args, sample, {"acc": number}) == {"acc": 1.0}
    assert sample.metadata == {}


def test_a_filter_gets_the_entry_of_an_answer_that_the_post_processing_reads():
    args, sample = Args(None), viewed(Sample(index=1))
    args.custom_reward_post_process_path, args.reward_key = "x:y", "acc"
    assert _numbered(args, sample, {"acc": "good"}) == {"acc": 0.0}
    assert sample.get_reward_value(args) == "good"
