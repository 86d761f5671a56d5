"""Which reward scores a sample, and what several rewards make of one."""

import asyncio

import pytest
from slime_core.config.sections import RewardSection
from slime_core.errors import PluginError, RewardError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import Reward
from slime_core.rewards.scorer import Scorer, _weighted
from slime_core.rollout.group import score
from slime_core.rundir.events import EventLog
from slime_core.samples import Sample, Status

pytestmark = pytest.mark.timeout(60)
INSTALLED = ("length", "returned", "acting_async", "lengths")


def pool_of(reference):
    if reference not in INSTALLED:
        raise PluginError(f"slime.rewards: no plugin is named {reference!r}")
    return RewardPool(f"misbehaving_rewards:{reference}", {}, workers=1, timeout_s=30)


def scored(weights, samples, *, group=False, **settings):
    async def main():
        scorer = Scorer(weights, pool_of=pool_of, **settings)
        await scorer.start()
        try:
            if group:
                return await scorer.score_group(samples)
            return await asyncio.gather(*(scorer.score(sample) for sample in samples))
        finally:
            await scorer.close()

    return asyncio.run(main())


def test_a_row_chooses_its_reward_before_the_run_and_the_sample_before_its_row():
    run = Sample(response="7")
    row = Sample(response="7", metadata={"rm_type": "returned"})
    sample = Sample(response="7 + 1", metadata={"rm_type": "length"}, custom_rm_path="returned")
    assert [r.score for r in scored({"length": 1.0}, [run, row, sample])] == [1.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("sample", "is_asked"),
    [
        (Sample(), False),
        (Sample(reward=1.0), False),
        (Sample(reward=1.0, custom_rm_path="length"), True),
        (Sample(metadata={"rm_type": "length"}), True),
        (Sample(reward=1.0, metadata={"rm_type": "length"}), False),  # its generator gave one
    ],
)
def test_without_a_reward_of_the_run_that_of_a_sample_is_asked(sample, is_asked):
    assert Scorer({}, pool_of=pool_of).asks(sample) is is_asked
    assert Scorer({"length": 1.0}, pool_of=pool_of).asks(sample)


def test_a_forced_reward_is_chosen_before_the_row_and_after_the_sample():
    row = Sample(response="7", metadata={"rm_type": "returned"})
    sample = Sample(response="7", custom_rm_path="returned")
    assert [r.score for r in scored({"length": 1.0}, [row, sample], forced=True)] == [1.0, 7.0]


@pytest.mark.parametrize(
    ("chooses", "words"),
    [
        ({"metadata": {"rm_type": "lenght"}}, "sample 3: slime.rewards: no plugin is named 'lenght'"),
        ({"custom_rm_path": "nope:f"}, "sample 3: slime.rewards: no plugin is named 'nope:f'"),
        ({"metadata": {"rm_type": 5}}, "sample 3: metadata['rm_type'] is 5; wanted the name of a reward"),
        ({"metadata": {"rm_type": ""}}, "sample 3: slime.rewards: no plugin is named ''"),
    ],
)
def test_an_unknown_name_is_a_failure_that_names_the_sample(chooses, words):
    failure, after = scored({"length": 1.0}, [Sample(index=3, **chooses), Sample(response="four")])
    assert failure.kind == "invalid"
    assert failure.message == words
    assert after.score == 4.0


def test_an_unknown_name_of_the_run_stops_the_start():
    with pytest.raises(PluginError, match="no plugin is named 'lenght'"):
        scored({"lenght": 1.0}, [])


def test_several_rewards_give_their_weighted_sum_and_each_its_own_score():
    (result,) = scored({"length": 0.5, "returned": 2.0}, [Sample(response="{'score': 10, 'why': 'x'}")])
    assert result.score == 0.5 * 25 + 2.0 * 10
    assert result.value == {
        "score": 32.5,
        "length": 25.0,
        "returned": 10.0,
        "details": {"length": 25.0, "returned": {"score": 10, "why": "x"}},
    }


@pytest.mark.parametrize(
    ("weights", "scores", "whole"),
    [
        ((0.7, 0.2, 0.1), (1, 1, 1), 1.0),  # one after the other: 0.9999999999999999
        ((0.1, 0.2, 0.7), (1, 1, 1), 1.0),
        ((0.01, 0.29, 0.7), (1, 1, 1), 1.0),  # also where the three floats are summed exactly
        ((0.7, 0.7, 0.6), (0.5, 0.5, 0.5), 1.0),
        ((0.1, 0.2, -0.3), (1, 1, 1), 0.0),
        ((2, 1, 1), (0.1, 0.1, 0.7), 1.0),
    ],
)
def test_a_weighted_sum_is_the_one_of_the_decimals_that_are_written(weights, scores, whole):
    names = ("length", "returned", "acting_async")
    results = [Reward(score=float(score), value=float(score), seconds=0.25) for score in scores]
    result = _weighted(Sample(), dict(zip(names, map(float, weights), strict=True)), results)
    assert result == Reward(
        score=whole, value={**result.value, "score": whole, "length": float(scores[0])}, seconds=0.75
    )


def test_a_weighted_sum_beyond_the_floats_is_a_failure_that_names_the_sample():
    results = [Reward(score=1e308, value=1e308, seconds=0.0)]
    failure = _weighted(Sample(index=3), {"length": 10.0}, results)
    assert (failure.kind, failure.message[:8]) == ("invalid", "sample 3")


def test_a_failing_part_fails_the_whole_and_names_itself():
    (failure,) = scored({"length": 1.0, "returned": 1.0}, [Sample(index=2, response="1 / 0")])
    assert failure.kind == "raised"
    assert failure.message.startswith(
        "sample 2: reward misbehaving_rewards:returned raised ZeroDivisionError"
    )


def test_a_part_without_a_score_cannot_be_weighted():
    (failure,) = scored({"length": 1.0, "returned": 1.0}, [Sample(index=2, response="{'a': 1}")])
    assert failure.message.startswith("sample 2: reward returned returned a dict without 'score'")


def test_sync_and_async_rewards_are_weighted_together():
    (result,) = scored({"length": 1.0, "acting_async": 10.0}, [Sample(response="ok")])
    assert result.score == 12.0


def test_a_group_is_scored_by_one_reward():
    same = [
        Sample(response="a", metadata={"rm_type": "lengths"}),
        Sample(response="bb", metadata={"rm_type": "lengths"}),
    ]
    assert [r.score for r in scored({"returned": 1.0}, same, group=True)] == [1.0, 2.0]
    failures = scored({"lengths": 1.0}, [Sample(index=0), Sample(index=1, custom_rm_path="x:f")], group=True)
    assert [f.message.split(";")[0] for f in failures] == [
        f"sample {i}: its group chooses several rewards, ['None', 'x:f']" for i in (0, 1)
    ]


@pytest.mark.parametrize(("on_error", "ends"), [("stop", True), ("drop", False)])
def test_a_failure_that_ends_the_run_waits_for_no_other_reward(on_error, ends):
    """The second sample's reward never returns, and has 1,000 s for that."""
    samples = [Sample(index=0, response="sys.exit"), Sample(index=1, response="hang")]

    async def main():
        scorer = Scorer({"acting_async": 1.0}, pool_of=lambda name: RewardPool(
            f"misbehaving_rewards:{name}", {}, workers=1, timeout_s=1000
        ))  # fmt: skip
        await scorer.start()
        scoring = asyncio.create_task(
            score(samples, scorer, RewardSection(on_reward_error=on_error), events=EventLog())
        )
        try:
            await asyncio.wait({scoring}, timeout=20 if ends else 0.5)
            return scoring.exception() if scoring.done() else None
        finally:
            scoring.cancel()
            await scorer.close()

    error = asyncio.run(main())
    assert isinstance(error, RewardError) == ends
    assert samples[0].status is Status.FAILED
    assert samples[1].status is not Status.FAILED
    if ends:
        assert str(error).startswith("sample 0: reward misbehaving_rewards:acting_async raised")
