"""`slime.utils.types.Sample`: what files of users do with it."""

from __future__ import annotations

import copy
import pickle

import pytest
from slime.utils.types import Sample
from slime_compat.views.running.namespace import Args
from slime_compat.views.samples.sample import viewed
from slime_core import samples
from slime_core.errors import SampleError
from slime_core.testing.tabular import load_tokenizer

META = {"finish_reason": {"type": "length"}, "weight_version": 3, "cached_tokens": 2, "prompt_tokens": 4}


def test_tokens_are_appended_with_what_the_engine_said_of_them():
    sample = Sample(prompt="ab", tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.25], meta_info=META, text="cd")
    sample.append_response_tokens(tokens=[5], trainable=False, text="e")
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 3, 4, 5], "cde", 3)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-0.5, -0.25, 0.0])
    assert sample.status is Sample.Status.TRUNCATED and sample.weight_versions == ["3"]
    assert (
        sample.prefix_cache_info.cached_tokens == 2 and sample.prefix_cache_info.prefix_cache_hit_rate == 0.5
    )
    assert sample.effective_response_length == 2


def test_tokens_without_log_probs_leave_the_sample_as_it_was():
    sample = Sample(index=7, tokens=[1])
    with pytest.raises(SampleError, match="sample 7: 2 trainable tokens without log_probs"):
        sample.append_response_tokens(tokens=[3, 4])
    with pytest.raises(SampleError, match="log_probs given for tokens that are not trainable"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0], trainable=False)
    assert sample.tokens == [1] and sample.response_length == 0


def test_versions_of_an_answer_go_no_further_than_what_is_appended_and_kept_of_it():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    told = {"finish_reason": {"type": "stop"}, "weight_version": "4", "weight_versions": spans}
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -1.0], meta_info=told)
    assert (sample.weight_versions, sample.weight_version_starts) == (["3"], [0])
    sample.append_response_tokens(tokens=[7], trainable=False)
    sample.append_response_tokens(tokens=[5, 6, 7], log_probs=[-1.0] * 3, meta_info=told)
    assert (sample.weight_versions, sample.weight_version_starts) == (["3", "3", "4"], [0, 3, 5])
    sample.strip_last_output_tokens(1, load_tokenizer(""))
    assert (sample.weight_versions, sample.weight_version_starts) == (["3", "3"], [0, 3])
    sample.strip_last_output_tokens(3, load_tokenizer(""))
    assert (sample.weight_versions, sample.environment_spans) == (["3"], [])


def test_a_view_is_the_sample_itself():
    ours = samples.Sample(index=1, tokens=[1, 2], response_length=1, loss_mask=[1])
    theirs = viewed(ours)
    assert theirs is ours and isinstance(theirs, samples.Sample)
    theirs.loss_masks = [0]
    assert ours.loss_mask == theirs.loss_masks == [0]
    for one in (copy.copy(theirs), copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        assert type(one) is Sample and one.to_dict() == theirs.to_dict()


def test_dicts_go_back_and_forth_and_unknown_keys_become_attributes():
    sample = Sample(index=1, prompt="a", tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)
    again = Sample.from_dict(sample.to_dict() | {"teacher_note": "x"})
    assert again.teacher_note == "x" and again.status == Sample.Status.COMPLETED
    assert Sample.from_dict(again.to_dict()).to_dict() == sample.to_dict()


def test_a_reward_is_read_by_the_key_of_the_run():
    sample = Sample(reward={"score": 1.0, "acc": 0.0})
    assert sample.get_reward_value(Args(None, reward_key="acc")) == 0.0
    assert sample.get_reward_value(Args(None, reward_key=None)) == {"score": 1.0, "acc": 0.0}


def test_counters_are_attributes():
    sample = Sample(spec_info={"spec_verify_ct": 2, "completion_token_num": 6})
    assert sample.spec_info.spec_accept_length == 3.0
    sample.spec_info.add({"spec_verify_ct": 1, "completion_tokens": 3})
    assert sample.spec_info == {
        "spec_verify_ct": 3, "completion_token_num": 9, "spec_accept_token_num": 0, "spec_draft_token_num": 0,
    }  # fmt: skip


def test_args_says_what_it_does_not_have():
    args = Args(None)
    assert getattr(args, "nothing", 5) == 5 and not hasattr(args, "nothing")
    with pytest.raises(AttributeError, match="args has no 'nothing': it is not a setting of this run"):
        _ = args.nothing
    args.mine = 3
    assert args.mine == 3 and vars(copy.deepcopy(args))["mine"] == 3
