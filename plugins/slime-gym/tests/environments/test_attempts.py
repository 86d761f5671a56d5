"""Several attempts at a problem: what each earns, what the policy is told, and that an aborted conversation goes on."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from slime_core.errors import ConfigError, SampleError
from slime_core.samples import Sample, Status
from slime_core.testing.contracts import check_environment
from slime_gym.environments.attempts import Attempts
from slime_gym.problems import training_problems

from ..test_source import sums


@pytest.fixture(scope="module")
def problem():
    return training_problems(sums())[0]


def sample_of(problem, **given):
    return Sample(
        index=4, group_index=0, prompt="?", tokens=[63], metadata={"gym": problem.origin.to_dict()}, **given
    )


def told(environment, sample, *turns):
    async def main():
        await environment.reset(sample)
        return [await environment.step(sample, turn) for turn in turns]

    return asyncio.run(main())


def test_attempts_end_at_the_right_answer(problem):
    wrong = str(int(problem.answer) + 1)
    first, second = told(Attempts(), sample_of(problem), wrong, f" {problem.answer}\n")
    assert (first.content, first.done, first.reward) == ("\nNot right. Attempts left: 2.\n", False, 0.0)
    assert (second.content, second.done, second.reward) == ("", True, 1.0)


def test_the_last_attempt_ends_the_conversation(problem):
    *_, last = told(Attempts(attempts=2), sample_of(problem), "no", "no")
    assert (last.content, last.done, last.reward) == ("", True, 0.0)


def test_partial_scores_add_up_to_the_best(problem):
    scores = {"a": 0.25, "b": 0.125, "c": 0.5, problem.answer: 1.0}
    environment = Attempts(attempts=4, partial=True, template="{score}")

    @dataclasses.dataclass
    class Scores:
        """The scorer of a task with these partial scores."""

        def score(self, answer):
            return scores[answer]

    environment._origin = lambda _: Scores()
    found = told(environment, sample_of(problem), "a", "b", "c", problem.answer)
    assert [each.reward for each in found] == [0.25, 0.0, 0.25, 0.5]
    assert [each.content for each in found] == ["0.25", "0.12", "0.50", ""]


def test_an_answer_is_what_the_expression_finds(problem):
    options = {"answer_regex": "<answer>(.*?)</answer>"}
    first, second = told(
        Attempts(**options), sample_of(problem), problem.answer, f"It is <answer>{problem.answer}</answer>"
    )
    assert (first.reward, second.reward) == (0.0, 1.0)


def test_a_turn_that_was_cut_off_is_the_last(problem):
    (last,) = told(Attempts(), sample_of(problem, status=Status.TRUNCATED), "no")
    assert last.done


def test_it_keeps_the_promises_of_environments(problem):
    answers = ["no", "neither", problem.answer]
    check_environment(Attempts, answers=answers, sample=sample_of(problem))


def test_bad_options_and_rows_are_refused(problem):
    for given, wanted in (
        ({"attempts": 0}, "at least 1"),
        ({"answer_regex": "a"}, "a group"),
        ({"answer_regex": "("}, "expression"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            Attempts(**given)
    with pytest.raises(SampleError, match="sample 3: metadata has no 'gym'"):
        told(Attempts(), Sample(index=3), "x")
