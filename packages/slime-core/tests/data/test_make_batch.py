"""Groups to a batch: layout, optimizer steps, weights, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_core.data.make_batch import make_batch, optimizer_steps
from slime_core.errors import SampleError
from slime_core.samples import Sample, Status


def raw(rewards, groups):
    return rewards


def per_token(view):
    return view.loss_mask / view.loss_mask.sum()


def sample(index: int, *, n: int = 2, group: int = 0, reward: float = 1.0, **fields) -> Sample:
    values = {
        "index": index, "group_index": group, "tokens": [10 + index] * 3 + [index] * n, "response_length": n,
        "reward": reward, "status": Status.COMPLETED, "rollout_log_probs": [-float(index)] * n,
    }  # fmt: skip
    return Sample(**(values | fields))


def batch(groups, *, size=2, **kwargs):
    return make_batch(
        0, groups, global_batch_size=size, temperature=1.0, transform=raw, reducer=per_token, **kwargs
    )


def test_columns_line_up():
    b = batch([[sample(0, n=1), sample(1, n=3, loss_mask=[1, 0, 1])]])
    assert b.tokens.tolist() == [10, 10, 10, 0, 11, 11, 11, 1, 1, 1]
    assert b.offsets.tolist() == [0, 4, 10]
    assert b.response_offsets.tolist() == [0, 1, 4]
    assert b.loss_mask.tolist() == [1, 1, 0, 1]
    assert b.rollout_log_probs.tolist() == [0, -1, -1, -1]
    np.testing.assert_allclose(b.weights, [1 / 3, 1 / 3, 0, 1 / 3])


def test_removed_sample_is_masked_and_keeps_its_reward():
    b = batch([[sample(0, reward=0.25, remove_sample=True), sample(1)]])
    assert b.loss_mask.tolist() == [0, 0, 1, 1]
    assert b.rewards.tolist() == [0.25, 1.0]


def test_siblings_stay_in_one_optimizer_step():
    group = [sample(0), sample(1, rollout_id=9), sample(2, rollout_id=9), sample(3)]
    b = batch([group], size=1)
    assert [positions.tolist() for positions in b.optimizer_steps] == [[0], [1, 2], [3]]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_steps_cover_every_sample_once(size, n_steps, fan_out):
    ids = np.repeat(np.arange(size * n_steps), fan_out)
    steps = optimizer_steps(ids, global_batch_size=size)
    assert len(steps) == n_steps
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(ids)))
    assert all(len(set(ids[positions])) == size for positions in steps)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(5, status=Status.ABORTED), "sample 5: status is aborted"),
        (sample(5, reward=float("nan")), "sample 5: reward is nan"),
        (sample(5, n=0), "sample 5: has no response token"),
        (sample(5, multimodal_inputs={"image": ["/a"]}), r"sample 5: its policy saw \['image'\]"),
        (sample(5, rollout_log_probs=None), "sample 5: has no rollout_log_probs, other samples"),
        (sample(5, tokens=[1, 1]), "sample 5: has no prompt token"),
        (sample(5, group_index=None), r"sample 5: index and group_index must be set"),
        (sample(5, reward=None), "sample 5: has no reward"),
    ],
)
def test_unfit_sample_is_named(bad, message):
    with pytest.raises(SampleError, match=message):
        batch([[sample(0), bad]])


def test_executions_that_do_not_fill_a_step_are_refused():
    with pytest.raises(
        SampleError, match="3 executions cannot be cut into optimizer steps of global_batch_size 2"
    ):
        batch([[sample(0), sample(1), sample(2)]])


def test_each_part_of_a_reward_is_transformed_by_itself():
    def centred(rewards, groups):
        means = {g: rewards[groups == g].mean() for g in groups}
        return rewards - [means[g] for g in groups]

    rewards = [
        {"score": 1.0, "acc": True, "brief": 0.5, "details": {"why": "x"}},
        {"score": 0, "acc": 0, "brief": 2},
    ]
    group = [sample(i, reward=reward) for i, reward in enumerate(rewards)]
    b = make_batch(
        0, [group, [sample(2, group=1, reward={"score": 3.0, "acc": 1, "brief": 7})]], global_batch_size=3,
        temperature=1.0, transform=centred, reducer=per_token, reward_parts=("brief", "acc"),
    )  # fmt: skip
    assert {name: values.tolist() for name, values in b.reward_parts.items()} == {
        "brief": [-0.75, 0.75, 0.0],
        "acc": [0.5, -0.5, 0.0],
    }
    assert b.rewards.tolist() == [0.5, -0.5, 0.0]


def test_parts_that_nobody_reads_are_not_carried():
    assert batch([[sample(0, reward={"score": 1.0, "acc": 1.0}), sample(1)]]).reward_parts == {}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"score": 1.0, "brief": 2.0},
            "sample 5: its reward has None for the part 'acc', .* its numbers are brief, score",
        ),
        ({"score": 1.0, "acc": "yes"}, "sample 5: its reward has 'yes' for the part 'acc'"),
        (
            {"score": 1.0, "acc": float("inf")},
            "sample 5: its reward has inf for the part 'acc', wanted a finite number",
        ),
        (1.0, "sample 5: its reward is 1.0, without the part 'acc'"),
    ],
)
def test_a_sample_that_lacks_a_part_is_named_and_the_part(reward, message):
    with pytest.raises(SampleError, match=message):
        batch(
            [[sample(0, reward={"score": 0.0, "acc": 1.0}), sample(5, reward=reward)]], reward_parts=["acc"]
        )


def test_transform_that_returns_nan_names_the_sample():
    with pytest.raises(SampleError, match="sample 1: the reward transform returned nan"):
        make_batch(
            0, [[sample(0), sample(1)]], global_batch_size=2, temperature=1.0,
            transform=lambda r, g: np.array([0.0, np.nan]), reducer=per_token,
        )  # fmt: skip


def test_shaping_is_added_to_rewards_before_the_transform_and_not_to_raw_rewards():
    b = batch([[sample(0, n=1, reward=2.0), sample(1, n=3)]], shaping=lambda lengths: -1.0 * lengths)
    assert b.rewards.tolist() == [1.0, -2.0]
    assert b.raw_rewards.tolist() == [2.0, 1.0]


def test_shaping_does_not_count_what_an_environment_put_in():
    turns = sample(0, n=1)
    turns.append_response([7, 7], trainable=False)
    b = batch([[turns, sample(1, n=3)]], shaping=lambda lengths: -1.0 * lengths)
    assert b.rewards.tolist() == [0.0, -2.0]
