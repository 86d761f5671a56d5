"""Several attempts at a problem: what each earns, what the policy is told, and that an aborted conversation goes on."""

from __future__ import annotations

import asyncio
import os

import pytest
from slime_core.errors import ConfigError, SampleError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.scorer import Scorer
from slime_core.runtime.closing import close_all
from slime_core.samples import Sample, Status
from slime_core.testing.contracts import check_environment
from slime_core.testing.contracts.environments import _Bytes
from slime_gym.environments.attempts import REWARD, SERVICE, Attempts
from slime_gym.problems import Origin, training_problems
from slime_gym.tasks import task

from ..test_source import sums


@pytest.fixture(scope="module")
def problem():
    return training_problems(sums())[0]


def sample_of(problem, **given):
    return Sample(
        index=4, group_index=0, prompt="?", tokens=[63], metadata={"gym": problem.origin.to_dict()}, **given
    )


def told(environment, sample, *turns, deadline_s=20.0):
    def pool(reward):
        return RewardPool(reward, {}, workers=1, timeout_s=deadline_s)

    async def main():
        services = {SERVICE: Scorer({REWARD: 1.0}, pool_of=pool)}
        environment.use(services)
        try:
            await environment.reset(sample)
            return [await environment.step(sample, turn) for turn in turns]
        finally:
            await close_all(list(services.values()))

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
    longer = [problem.answer + "?" * (n - 1) * len(problem.answer) for n in (4, 8, 2, 1)]
    environment = Attempts(attempts=4, partial=True, template="{score}")
    found = told(environment, sample_of(problem), *longer)
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


@pytest.fixture(scope="module")
def matrix():
    """A sample of a task whose scorer evaluates an answer as Python, and one that it has a score for."""
    options = {"min_n": 2, "max_n": 2, "p_zero": 0.5}
    entry = task("binary_matrix", options, seed=3, size=1)[0]
    origin = Origin(task="binary_matrix", task_args=options, seed=3, size=1, index=0)
    sample = Sample(index=4, group_index=0, prompt="?", tokens=[63], metadata={"gym": origin.to_dict()})
    return sample, entry["answer"]


def test_an_answer_that_a_scorer_evaluates_runs_in_another_process(matrix, tmp_path):
    sample, answer = matrix
    marks = f"__import__('pathlib').Path('{tmp_path}/' + str(__import__('os').getpid())).touch() or [[1]]"
    first, last = told(Attempts(), sample, marks, answer)
    assert (first.reward, first.done, last.reward) == (0.0, False, 1.0)
    (process,) = os.listdir(tmp_path)
    assert process != str(os.getpid())


def test_an_answer_that_ends_or_holds_its_process_scores_0_and_says_why(matrix):
    sample, answer = matrix
    turns = ["__import__('os')._exit(0)", "len(str(9**9**9))", "[[exit()]]", answer]
    crashed, hung, left, right = told(Attempts(attempts=4), sample, *turns, deadline_s=2.0)
    assert [each.reward for each in (crashed, hung, left, right)] == [0.0, 0.0, 0.0, 1.0]
    assert "crashed" in crashed.info["failed"]
    assert "2 s" in hung.info["failed"]
    assert "failed" not in right.info


def test_it_keeps_the_promises_of_environments(problem):
    answers = ["no", problem.answer]
    check_environment(Attempts, answers=answers, sample=sample_of(problem))


class EndsByBar(_Bytes):
    """The byte of `|` ends a sequence, and is spelled as any other."""

    eos_token_id = ord("|")


def test_what_ends_a_turn_is_no_part_of_the_answer(problem):
    answers = ["no|", f"{problem.answer}|"]
    check_environment(Attempts, answers=answers, sample=sample_of(problem), tokenizer=EndsByBar())


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
