"""Rewards that were written for other frameworks, unchanged; and the group reward `majority`."""

import pytest
from slime_core.errors import PluginError, RewardError, SampleError
from slime_core.sample import Sample
from slime_rm.adapters.trl import TrlGroupReward, TrlReward
from slime_rm.adapters.verl import VerlReward
from slime_rm.majority import majority

VERL = """
import dataclasses

@dataclasses.dataclass
class Weights:
    right: float = 1.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "gsm8k":
        raise NotImplementedError(data_source)
    right = float(solution_str.strip() == ground_truth) * Weights().right
    return {"score": right, "index": (extra_info or {}).get("index", -1)}

def scaled(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * len(solution_str)

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return True

def unscored(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
"""
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
def verl_file(tmp_path):
    (tmp_path / "my_reward.py").write_text(VERL)
    return str(tmp_path / "my_reward.py")


@pytest.fixture
def trl_file(tmp_path):
    (tmp_path / "my_rewards.py").write_text(TRL)
    return str(tmp_path / "my_rewards.py")


def test_a_verl_file_scores_with_the_rows_metadata(verl_file):
    sample = Sample(
        response=" 72 ", label="72", metadata={"data_source": "gsm8k", "extra_info": {"index": 5}}
    )
    assert VerlReward(path=verl_file)(sample) == {"score": 1.0, "index": 5}


def test_a_verl_row_may_hold_its_truth_where_verl_has_it(verl_file):
    sample = Sample(response="72", metadata={"reward_model": {"style": "rule", "ground_truth": "72"}})
    assert VerlReward(path=verl_file, data_source="gsm8k")(sample)["score"] == 1.0


def test_another_function_of_a_verl_file_gets_its_arguments(verl_file):
    reward = VerlReward(path=verl_file, function="scaled", reward_kwargs={"scale": 2.0}, data_source="x")
    assert reward(Sample(response="abc")) == 6.0
    assert VerlReward(path=verl_file, function="later", data_source="x")(Sample()) is True


def test_what_a_verl_file_lacks_is_an_error(verl_file, tmp_path):
    with pytest.raises(SampleError, match="sample 3: metadata has no 'data_source'"):
        VerlReward(path=verl_file)(Sample(index=3))
    with pytest.raises(RewardError, match=r"keys \['acc'\]; wanted 'score'"):
        VerlReward(path=verl_file, function="unscored", data_source="x")(Sample())
    with pytest.raises(PluginError, match=r"has no function 'computescore'; it has compute_score, later"):
        VerlReward(path=verl_file, function="computescore")
    with pytest.raises(PluginError, match="found nothing; wanted the file of the reward"):
        VerlReward(path=str(tmp_path / "other.py"))


def test_a_trl_function_scores_one_sample(trl_file):
    reward = TrlReward(path=trl_file, function="by_length")
    assert reward(Sample(prompt="p", response="four")) == 4.0
    assert TrlReward(path=trl_file, function="later")(Sample()) == 1.0


def test_a_trl_function_gets_columns_ids_and_messages(trl_file):
    sample = Sample(
        prompt=[{"role": "user", "content": "2+2?"}],
        response="4",
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
    group = [Sample(response="ab"), Sample(response="abcd")]
    assert TrlGroupReward(path=trl_file, function="relative")(group) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [("not_mine", "returned None for sample 3"), ("short", "returned list of 1; wanted a list of 2 scores")],
)
def test_what_a_trl_function_must_not_return_is_an_error(trl_file, function, words):
    with pytest.raises(RewardError, match=words):
        TrlGroupReward(path=trl_file, function=function)([Sample(index=3), Sample(index=4)])


def test_the_majority_is_right_however_it_is_written():
    responses = [r"\boxed{0.5}", r"\boxed{7}", r"\boxed{\frac12}", "no box", r"\boxed{1/2}"]
    grades = majority([Sample(response=response) for response in responses])
    assert [grade.score for grade in grades] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert {grade.parts["share"] for grade in grades} == {0.6}
    assert grades[3].details == {"answer": None, "majority": "0.5"}


def test_of_answers_given_equally_often_the_first_is_right():
    assert [g.score for g in majority([Sample(response=rf"\boxed{{{n}}}") for n in (3, 4)])] == [1.0, 0.0]


def test_a_group_without_answers_has_no_majority():
    assert [grade.score for grade in majority([Sample(response="?"), Sample(response="")])] == [0.0, 0.0]
