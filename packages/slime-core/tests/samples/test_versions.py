"""Weight versions of tokens: from generation calls to one number a token, and which spans are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from slime_core.data.make_batch import make_batch
from slime_core.errors import SampleError
from slime_core.rundir.records import RecordWriter, read_records, records_of
from slime_core.samples import Sample
from slime_core.samples.versions import UNKNOWN_VERSION, version_spans
from slime_core.testing.tabular import TabularTrainer, credit, reinforce


def two_turns(index=0):
    """An environment's opening of 2 tokens, 3 tokens of version 5, an answer of 2, 1 of version 5, 2 of version 7."""
    sample = Sample(index=index, group_index=0, tokens=[1], reward=1.0)
    sample.append_response([8, 8], trainable=False)
    sample.append_response([1, 2, 3], weight_version="5")
    sample.append_response([9, 9], trainable=False)
    sample.append_response([4], weight_version="5")
    sample.append_response([5, 6], weight_version="7", finish_reason="stop")
    return sample


def one_call(index, version, n=2):
    sample = Sample(index=index, group_index=0, tokens=[1], reward=0.0)
    sample.append_response([2] * n, weight_version=version, finish_reason="stop")
    return sample


def batch_of(samples, step):
    return make_batch(
        step,
        [samples],
        global_batch_size=len(samples),
        temperature=1.0,
        transform=lambda rewards, groups: rewards,
        reducer=lambda view: view.loss_mask,
    )


def test_tokens_that_are_put_in_count_for_the_turn_before_them_the_first_ones_for_the_first():
    sample = two_turns()
    assert sample.weight_version_starts == [2, 7, 8]
    assert version_spans([sample]).by_token().tolist() == [5, 5, 5, 5, 5, 5, 5, 5, 7, 7]
    spans = version_spans([one_call(1, "3"), sample, one_call(2, "initial", 1)])
    assert spans.versions.tolist() == [3, 5, 5, 7, UNKNOWN_VERSION]
    assert spans.offsets.tolist() == [0, 2, 9, 10, 12, 13]


def test_a_batch_has_the_staleness_of_each_token():
    batch = batch_of([one_call(1, "7"), two_turns(), one_call(2, "6", 1)], step=8)  # it trains version 7
    assert batch.staleness.tolist() == [0, 0, *[2] * 8, 0, 0, 1]


def test_staleness_is_refused_where_the_weights_of_a_trained_token_are_not_known():
    batch = batch_of([one_call(1, "7"), one_call(2, "initial")], step=8)
    with pytest.raises(SampleError, match="sample 2: the weights of response token 0 are not known"):
        _ = batch.staleness
    masked = replace(batch, loss_mask=np.array([1, 1, 0, 0], dtype=np.float32))
    assert masked.staleness.tolist() == [0, 0, 0, 0]
    assert batch_of([one_call(1, "none")], step=1).weight_versions is not None
    unknown = one_call(1, "7")
    unknown.weight_versions, unknown.weight_version_starts = [], []
    assert batch_of([unknown], step=1).weight_versions is None


@pytest.mark.parametrize("needs", [{"staleness"}, set()])
def test_the_trainer_of_the_table_gives_it_to_estimators_and_losses_that_read_it(needs):
    views = []

    def estimate(view):
        views.append(view)
        return credit(view)

    trainer = TabularTrainer(estimator=estimate, loss=reinforce, lr=1.0, needs=needs)
    asyncio.run(trainer.train(batch_of([one_call(1, "7"), one_call(2, "5", 1)], step=8)))
    (view,) = views
    assert (None if view.staleness is None else view.staleness.tolist()) == ([0, 0, 2] if needs else None)


@pytest.mark.parametrize(
    ("versions", "starts", "told"),
    [
        (["5"], [], "weight_version_starts has 0 entries for 1 weight_versions"),
        (["5", "6"], [0, 11], r"weight_version_starts\[1\] is 11 .* from 0 to 10"),
        (["5", "6"], [2, 1], r"weight_version_starts\[1\] is 1 .* from 2 to 10"),
        (["5"], [True], r"weight_version_starts\[0\] is True"),
        (["5"], [3], r"weight_version_starts\[0\] is 3 .* at most 2, the first generated token"),
    ],
)
def test_spans_that_are_not_of_the_tokens_are_refused(versions, starts, told):
    sample = replace(two_turns(), weight_versions=versions, weight_version_starts=starts)
    with pytest.raises(SampleError, match=told):
        sample.check()


def test_a_record_has_the_spans(tmp_path):
    sample, writer = two_turns(), RecordWriter()
    writer.write(tmp_path / "one.jsonl", records_of([sample]))
    writer.flush()
    (row,) = read_records(tmp_path / "one.jsonl")
    written = Sample(
        **{
            name: row[name]
            for name in ("tokens", "response_length", "weight_versions", "weight_version_starts")
        }
    )
    assert version_spans([written]).by_token().tolist() == version_spans([sample]).by_token().tolist()


def test_a_sample_of_an_older_checkpoint_has_its_oldest_version_throughout():
    values = two_turns().to_dict()
    del values["weight_version_starts"]
    sample = Sample.from_dict(values)
    assert (sample.weight_versions, sample.weight_version_starts) == (["5"], [0])
    assert version_spans([sample]).by_token().tolist() == [5] * 10


def test_a_turn_without_tokens_has_no_version():
    sample = Sample(index=0, group_index=0, tokens=[1])
    sample.append_response([], weight_version="0")
    sample.append_response([8], trainable=False)
    sample.append_response([1, 2], weight_version="3", finish_reason="stop")
    assert (sample.weight_versions, sample.weight_version_starts) == (["3"], [1])
