"""Reward files written for verl."""

import pytest
from slime_core.errors import PluginError, RewardError, SampleError
from slime_core.samples import Sample
from slime_rm.adapters.verl import VerlReward

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

def typed(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth == [7, 2])

def unscored(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
"""


@pytest.fixture
def verl_file(tmp_path):
    (tmp_path / "my_reward.py").write_text(VERL)
    return str(tmp_path / "my_reward.py")


def test_a_verl_file_scores_with_the_rows_metadata(verl_file):
    sample = Sample(
        response=" 72 ", label="72", metadata={"data_source": "gsm8k", "extra_info": {"index": 5}}
    )
    assert VerlReward(path=verl_file)(sample) == {"score": 1.0, "index": 5}


def test_a_verl_row_may_hold_its_truth_where_verl_has_it(verl_file):
    sample = Sample(response="72", metadata={"reward_model": {"style": "rule", "ground_truth": "72"}})
    assert VerlReward(path=verl_file, data_source="gsm8k")(sample)["score"] == 1.0


def test_a_truth_that_is_no_text_stays_what_the_row_has(verl_file):
    """The label is JSON of it then: `72`, which is not the number."""
    reward = VerlReward(path=verl_file, function="typed", data_source="x")
    sample = Sample(label="[7, 2]", metadata={"reward_model": {"ground_truth": [7, 2]}})
    assert reward(sample) == 1.0


def test_another_function_of_a_verl_file_gets_its_arguments(verl_file):
    reward = VerlReward(path=verl_file, function="scaled", reward_kwargs={"scale": 2.0}, data_source="x")
    assert reward(Sample(response="abc")) == 6.0
    assert reward(Sample(response="abc<|im_end|>")) == 6.0  # verl decodes without special tokens
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
