"""What a reward may return: numbers, dicts and lists for groups; everything else is a failure that says so."""

import asyncio
import time

import numpy as np
import pytest
from slime_core.rewards.results import Grade, Reward, plain_value
from slime_core.samples import Sample

from .conftest import pool_of, scores

pytestmark = pytest.mark.timeout(300)


def test_a_number_is_the_score():
    begin = time.monotonic()
    (result,) = scores("length", ["four"], options={"scale": 0.5})
    assert (result.score, result.value) == (2.0, 2.0)
    assert 0 <= result.seconds < time.monotonic() - begin


def test_the_score_of_a_dict_is_its_entry_score():
    (result,) = scores("returned", ["{'score': 1, 'parts': (0.5, True, None), 'pred': 'x'}"])
    assert result.score == 1.0
    assert result.value == {"score": 1, "parts": [0.5, True, None], "pred": "x"}


def test_a_dict_without_the_entry_score_has_no_score_of_its_own():
    (result,) = scores("returned", ["{'accuracy': 1}"])
    assert result.score is None


def test_a_grade_becomes_a_dict_of_score_parts_and_details():
    assert plain_value(Grade(score=0.5, parts={"f1": 0.5}, details={"answer": ("7", None)})) == {
        "score": 0.5,
        "f1": 0.5,
        "details": {"answer": ["7", None]},
    }
    assert plain_value(Grade(score=True)) == {"score": True}
    assert "the part 'details'" in plain_value(Grade(score=1.0, parts={"details": 1.0})).what
    assert "returned nan at ['score']" in plain_value(Grade(score=float("nan"))).what


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "returned None"),
        ("float('nan')", "returned nan"),
        ("float('inf')", "returned inf"),
        ("'1.0'", "returned str '1.0'"),
        ("[1.0]", "returned list"),
        ("10 ** 400", "returned an integer too large for a float"),
        ("{'score': float('nan')}", "returned nan at ['score']"),
        ("{'a': {'b': [0, float('inf')]}}", "returned inf at ['a']['b'][1]"),
        ("{1: 2}", "returned a dict with the key int 1"),
        ("{'f': object()}", "returned object at ['f']"),
    ],
)
def test_anything_but_a_finite_number_or_a_plain_dict_is_invalid(returned, words):
    failed = plain_value(eval(returned))
    assert failed.kind == "invalid"
    assert words in failed.what


def test_an_invalid_result_names_sample_and_reward():
    (failure,) = scores("returned", ["None"])
    assert failure.kind == "invalid"
    assert failure.message.startswith("sample 0: reward misbehaving_rewards:returned returned None; ")


def test_numbers_of_other_libraries_become_floats():
    values = [True, 3, np.float32(0.5), np.int64(2), np.bool_(True), np.array(1.5)]
    assert [plain_value(value) for value in values] == [1.0, 3.0, 0.5, 2.0, 1.0, 1.5]
    assert all(type(plain_value(value)) is float for value in values)
    assert plain_value({"parts": np.array([[1, 2]])}) == {"parts": [[1, 2]]}


def test_an_awaitable_of_a_sync_reward_is_invalid():
    (failure,) = scores("forgets_to_await", [""])
    assert failure.kind == "invalid"
    assert "async def" in failure.message


def group_scores(name, responses):
    async def main():
        async with pool_of(name) as pool:
            return await pool.score_group(
                [Sample(index=i, response=text) for i, text in enumerate(responses)]
            )

    return asyncio.run(main())


def test_a_group_reward_scores_each_sample_in_order():
    assert [result.score for result in group_scores("lengths", ["a", "bb", "", "dddd"])] == [1, 2, 0, 4]


@pytest.mark.parametrize(
    ("returned", "words"), [("[1.0]", "1 scores for a group of 2"), ("1.0", "returns a list")]
)
def test_a_group_reward_of_another_shape_fails_every_sample(returned, words):
    failures = group_scores("group_returned", [returned, ""])
    assert [failure.kind for failure in failures] == ["invalid", "invalid"]
    assert all(words in failure.message for failure in failures)
    assert failures[1].message.startswith("sample 1: ")


def test_one_bad_entry_of_a_group_fails_that_sample_only():
    good, bad = group_scores("group_returned", ["[1.0, None]", ""])
    assert isinstance(good, Reward)
    assert bad.kind == "invalid"


def test_an_error_of_a_group_reward_fails_every_sample():
    failures = group_scores("acting", ["a", "b"])
    assert [failure.kind for failure in failures] == ["raised", "raised"]
