"""ReMax: the baseline by hand, and the greedy response that it comes from."""

import asyncio

import pytest
import torch
from slime_algos.advantages.remax import remax
from slime_algos.greedy_baseline import greedy_baseline
from slime_algos.testing import view_of
from slime_core.errors import TrainerError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample, Status
from slime_core.testing.tabular import TabularEngine, load_tokenizer


def test_baseline_is_the_reward_of_the_groups_greedy_sample():
    """The last sample is not trained on either, for a reason of its own: it is no baseline."""
    baseline = {"is_baseline": True}
    view = view_of(
        [[1, 1], [0], [1], [0], [0]],
        rewards=[3.0, 1.0, 2.0, 5.0, 9.0],
        group_ids=torch.tensor([7, 7, 2, 2, 2]),
        train_metadata=[None, baseline, {"other": 1}, baseline, None],
    )
    assert (remax(view)[0] * view.loss_mask).tolist() == [2.0, 2.0, 0.0, -3.0, 0.0, 0.0]


def test_a_group_without_a_baseline_is_named():
    view = view_of(
        [[1], [0], [1]],
        rewards=[1.0, 1.0, 1.0],
        group_ids=torch.tensor([7, 7, 4]),
        train_metadata=[None, {"is_baseline": True}, None],
    )
    with pytest.raises(TrainerError, match="group 4 has no sample to take"):
        remax(view)


def generate(*, evaluation=False, tokens=3, status=Status.PENDING):
    engine = TabularEngine()
    engine.table[:] = torch.randn(engine.table.shape, generator=torch.Generator().manual_seed(0)).numpy()
    context = GenerateContext(engine=engine, tokenizer=load_tokenizer(None), evaluation=evaluation)
    sample = Sample(index=4, group_index=2, prompt="a", tokens=[1], label="b", status=status)
    return engine, asyncio.run(
        greedy_baseline(context, sample, SamplingParams(max_new_tokens=tokens, seed=1))
    )


def test_the_greedy_response_is_of_the_same_execution_and_not_trained_on():
    engine, (sampled, greedy) = generate()
    assert (sampled.rollout_id, greedy.rollout_id) == (4, 4)
    assert (sampled.remove_sample, greedy.remove_sample) == (False, True)
    assert (sampled.train_metadata, greedy.train_metadata) == (None, {"is_baseline": True})
    assert greedy.label == "b"
    assert greedy.response_tokens[0] == int(engine.table[1].argmax())


def test_an_evaluation_has_no_second_response():
    assert len(generate(evaluation=True)[1]) == 1


def test_an_aborted_execution_begins_anew():
    class Aborting(TabularEngine):
        async def generate(self, tokens, params, *, session_id=None):
            completion = await super().generate(tokens, params, session_id=session_id)
            reason = "abort" if params.temperature == 0 else completion.finish_reason
            return type(completion)(**(vars(completion) | {"finish_reason": reason}))

    context = GenerateContext(engine=Aborting(), tokenizer=load_tokenizer(None))
    sample = Sample(index=4, group_index=2, prompt="a", tokens=[1])
    (again,) = asyncio.run(greedy_baseline(context, sample, SamplingParams(max_new_tokens=3, seed=1)))
    assert (again.status, again.response_length, again.tokens) == (Status.ABORTED, 0, [1])
