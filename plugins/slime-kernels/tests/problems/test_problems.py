"""Problems: rows of KernelBench and of the fork, generated ones, and what is refused."""

from __future__ import annotations

import pytest
from slime_core.data.rows.record import Record
from slime_core.errors import DataError
from slime_kernels.problems.generated import generated_problems
from slime_kernels.problems.problem import problem_from, problem_of
from slime_kernels.problems.templates import FAMILIES

CODE = "class Model:\n    pass\ndef get_inputs():\n    return []\ndef get_init_inputs():\n    return []\n"
ROW = {"level": 1, "problem_id": 19, "name": "19_ReLU", "code": CODE}


def test_a_row_of_kernelbench_is_a_problem():
    problem = problem_of(Record("rows.jsonl:1", ROW))
    assert (problem.title, problem.code) == ("level 1 problem 19 (19_ReLU)", CODE)
    assert problem_from(problem.to_dict()) == problem


def test_a_row_of_the_fork_is_a_problem():
    extra = {"level": 2, "problem_id": 3, "problem_name": "3_x"}
    problem = problem_of(Record("rows.jsonl:1", {"label": CODE, "extra_info": extra, "prompt": []}))
    assert (problem.level, problem.problem_id, problem.name, problem.code) == (2, 3, "3_x", CODE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"level": "1"}, "rows.jsonl:1: found str '1' in 'level'; wanted int"),
        ({"level": 5}, "found the level 5; wanted 1 to 4"),
        ({"code": "x ="}, "found code that is not Python"),
        ({"code": "class Model: pass"}, "without get_inputs, get_init_inputs"),
        ({"shapes": [{"n": 0}]}, "in 'shapes'"),
        ({"dtypes": ["int8"]}, "in 'dtypes'; wanted a list of float32, float16, bfloat16"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(change, said):
    with pytest.raises(DataError, match=r"rows\.jsonl:1") as caught:
        problem_of(Record("rows.jsonl:1", {**ROW, **change}))
    assert said in str(caught.value)


def test_generated_problems_are_distinct_and_the_same_each_time():
    train, held_out = generated_problems(30, seed=1, held_out=6)
    codes = [one.code for one in (*train, *held_out)]
    assert len(set(codes)) == 36
    assert generated_problems(30, seed=1, held_out=6) == (train, held_out)
    assert generated_problems(30, seed=2, held_out=6) != (train, held_out)
    assert {one.name.partition("_")[0] for one in train} == set(FAMILIES)


def test_an_unknown_family_is_refused_with_the_nearest():
    with pytest.raises(DataError, match="did you mean 'softmax'"):
        generated_problems(1, families=["sofmax"])
