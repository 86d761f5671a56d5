"""The gym reward: exact, by the task's own scorer."""

import json
from dataclasses import asdict

import pytest
import reasoning_gym
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_gym.problems import Origin, training_problems
from slime_gym.reward import gym
from slime_gym.section import GymSection

#: One task of each of six categories, with options that are not the defaults.
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3},
    "base_conversion": {"max_base": 12},
    "countdown": {"min_numbers": 3, "max_numbers": 4},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "knights_knaves": {"n_people": 2},
    "number_sorting": {"min_numbers": 3, "max_numbers": 4},
}


def sample_of(problem, response: str) -> Sample:
    metadata = json.loads(json.dumps({"gym": asdict(problem.origin)}))
    return Sample(index=17, label=problem.answer, response=response, metadata=metadata)


@pytest.fixture(scope="module")
def problem():
    section = GymSection(task_args={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, size=1)
    return training_problems(section)[0]


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_own_answer_scores_one_after_a_round_trip_through_json(name):
    section = GymSection(task=name, task_args=TASKS[name], size=5, eval_size=0)
    for problem in training_problems(section):
        assert gym(sample_of(problem, problem.answer)).score == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_origin_makes_the_same_entry_as_reasoning_gym(name):
    origin = Origin(task=name, task_args=TASKS[name], seed=3, size=4, index=2)
    assert origin.entry() == reasoning_gym.create_dataset(name, **TASKS[name], seed=3, size=4)[2]


def test_first_line_counts_and_blanks_around_it_do_not(problem):
    assert gym(sample_of(problem, f" {problem.answer} \n1 + 1 = 3\n")).score == 1.0


@pytest.mark.parametrize("end", ["<|im_end|>", "\n<|im_end|>", "</s>", "<|im_end|>\n<|endoftext|>"])
def test_special_tokens_that_end_a_response_are_no_part_of_the_answer(problem, end):
    assert gym(sample_of(problem, f"{problem.answer}{end}")).score == 1.0
    assert gym(sample_of(problem, end)).score == 0.0


def test_answer_on_a_later_line_scores_zero(problem):
    assert gym(sample_of(problem, f"let me see\n{problem.answer}")).score == 0.0


@pytest.mark.parametrize("response", ["", " \n\n", "no idea", "-", "99999"])
def test_wrong_and_empty_responses_score_zero(problem, response):
    assert gym(sample_of(problem, response)).score == 0.0


@pytest.mark.parametrize("error", [AttributeError("'dict' object has no attribute 'x'"), SystemExit(3)])
def test_what_the_scorer_cannot_take_is_the_answers_fault(problem, monkeypatch, error):
    def raises(self, answer):
        raise error

    monkeypatch.setattr(Origin, "score", raises)
    grade = gym(sample_of(problem, '{"Agent[0.5, 0.5]": "move"}'))
    assert grade.score == 0.0
    assert grade.details["failed"] == f"the scorer raised {type(error).__name__}: {error}"


def test_partial_score_is_given_only_on_demand(problem):
    response = f"it is {problem.answer} and that is it"
    assert gym(sample_of(problem, response)).score == 0.0
    assert 0.0 < gym(sample_of(problem, response), partial=True).score < 1.0


def test_answers_of_several_lines_are_read_whole():
    problem = training_problems(GymSection(task="game_of_life", size=1, eval_size=0))[0]
    sudoku = training_problems(GymSection(task="mini_sudoku", size=1, eval_size=0))[0]
    assert len(sudoku.answer.splitlines()) == 4
    assert gym(sample_of(sudoku, sudoku.answer + "\nDone.")).score == 1.0
    assert gym(sample_of(sudoku, sudoku.answer.splitlines()[0])).score == 0.0
    assert gym(sample_of(problem, problem.answer)).score == 1.0


def test_sample_of_another_source_is_refused_by_name():
    with pytest.raises(SampleError, match="sample 3: metadata has no 'gym'"):
        gym(Sample(index=3, response="1", label="1"))


def test_label_that_is_not_the_problems_answer_is_an_error(problem):
    sample = sample_of(problem, "1")
    sample.label = "another"
    with pytest.raises(SampleError, match="sample 17: label is 'another'"):
        gym(sample)
