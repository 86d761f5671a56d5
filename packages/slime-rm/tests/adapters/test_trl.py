"""Reward functions written for TRL."""

import pytest
from slime_core.errors import RewardError
from slime_core.samples import Sample
from slime_rm.adapters.trl import TrlGroupReward, TrlReward

TRL = """
def by_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def right(prompts, completions, completion_ids, solution, level, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(t == s) * v + len(ids) for t, s, v, ids in zip(texts, solution, level, completion_ids)]

def relative(completions, **kwargs):
    longest = max(map(len, completions))
    return [len(completion) / longest for completion in completions]

async def later(completions, **kwargs):
    return [1.0 for _ in completions]

def not_mine(completions, **kwargs):
    return [None for _ in completions]

def short(completions, **kwargs):
    return [1.0]
"""


@pytest.fixture
def trl_file(tmp_path):
    (tmp_path / "my_rewards.py").write_text(TRL)
    return str(tmp_path / "my_rewards.py")


def test_a_trl_function_scores_one_sample(trl_file):
    reward = TrlReward(path=trl_file, function="by_length")
    assert reward(Sample(prompt="p", response="four")) == 4.0
    assert TrlReward(path=trl_file, function="later")(Sample()) == 1.0


def test_a_trl_function_gets_columns_ids_and_messages(trl_file):
    sample = Sample(
        prompt=[{"role": "user", "content": "2+2?"}],
        response="4<|im_end|>",  # TRL decodes without special tokens
        label="4",
        tokens=[1, 2, 3],
        response_length=2,
        metadata={"level": 3.0},
    )
    assert TrlReward(path=trl_file, function="right")(sample) == 5.0


def test_a_text_prompt_may_be_given_as_conversation(trl_file):
    sample = Sample(prompt="2+2?", response="4", label="4", metadata={"level": 3.0})
    assert TrlReward(path=trl_file, function="right", conversational=True)(sample) == 3.0


def test_a_trl_function_sees_its_whole_group(trl_file):
    group = [Sample(response="ab</s>"), Sample(response="abcd<|im_end|>\n")]
    assert TrlGroupReward(path=trl_file, function="relative")(group) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [("not_mine", "returned None for sample 3"), ("short", "returned list of 1; wanted a list of 2 scores")],
)
def test_what_a_trl_function_must_not_return_is_an_error(trl_file, function, words):
    with pytest.raises(RewardError, match=words):
        TrlGroupReward(path=trl_file, function=function)([Sample(index=3), Sample(index=4)])
