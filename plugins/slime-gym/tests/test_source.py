"""The source of gym problems: distinct, held out by question, the same on every start."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError
from slime_core.config.sections import DataSection, EvalSection, RolloutSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, DataError
from slime_gym.problems import held_out_problems, training_problems
from slime_gym.section import GymSection
from slime_gym.source import create_source

SHOTS = "5 + 2 = 7\n1 + 8 = 9\n6 - 4 = 2\n3 - 7 = -4\n"
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


class Bytes:
    """A tokenizer whose ids are bytes."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode()

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: Any = None, **kwargs: Any) -> str:
        return (
            "".join(f"<{m['role']}>{m['content']}" for m in messages) + f"<assistant>{kwargs.get('tail', '')}"
        )


@dataclass
class Build:
    """The part of a `BuildContext` that the source reads."""

    gym: GymSection
    data: DataSection = field(default_factory=DataSection)
    rollout: RolloutSection = field(
        default_factory=lambda: RolloutSection(
            rollout_batch_size=4, n_samples_per_prompt=3, rollout_max_response_len=8
        )
    )
    eval: EvalSection = field(default_factory=EvalSection)
    tokenizer: Bytes = field(default_factory=Bytes)
    evaluation: bool = False

    @property
    def settings(self) -> Settings:
        sections = {"gym": self.gym, "data": self.data, "rollout": self.rollout, "eval": self.eval}
        return Settings(sections, {}, {})

    def section(self, section_type: type[Any]) -> Any:
        return self.settings.section(section_type)


def sums(**changes: Any) -> GymSection:
    values = {
        "task_args": ONE_DIGIT,
        "size": 68,
        "eval_size": 128,
        "question_regex": r": (.*)",
        "prompt_template": SHOTS + "{question}",
    }
    return GymSection(**(values | changes))


def test_prompt_is_the_examples_and_the_kept_part_of_the_question():
    source = create_source(Build(sums()))
    sample = source.take(1)[0][0]
    assert re.fullmatch(re.escape(SHOTS) + r"\d [+-] \d =", sample.prompt)
    assert sample.tokens == list(sample.prompt.encode())
    assert sample.response_length == 0


def test_label_is_the_value_of_the_question():
    for group in create_source(Build(sums())).take(68):
        question = group[0].prompt.splitlines()[-1].removesuffix(" =")
        assert eval(question) == int(group[0].label)


def test_training_and_held_out_questions_are_distinct_and_disjoint():
    section = sums()
    training = {p.question for p in training_problems(section)}
    held_out = {p.question for p in held_out_problems(section)}
    assert (len(training), len(held_out), training & held_out) == (68, 128, set())


def test_seeds_that_overlap_in_reasoning_gym_still_give_disjoint_sets():
    # With two to six terms of up to four digits chance alone gives no repeats, and reasoning-gym's seeds 7 and 8
    # make the same problems but one.
    section = GymSection(size=50, eval_size=50, seed=7, eval_seed=8)
    training = {p.question for p in training_problems(section)}
    assert not training & {p.question for p in held_out_problems(section)}


def test_questions_that_the_prompt_answers_are_left_out():
    section = sums()
    questions = {p.question for p in training_problems(section) + held_out_problems(section)}
    # 10 x 10 one-digit pairs with two signs, without the four examples
    assert len(questions) == 196
    assert not questions & {"5 + 2 =", "1 + 8 =", "6 - 4 =", "3 - 7 ="}


def test_more_problems_than_the_task_has_are_refused_with_the_number_there_is():
    with pytest.raises(
        DataError, match=r"gym\.size: chain_sum made 68 distinct problems besides the 128 held out"
    ):
        training_problems(sums(size=69))


def test_two_starts_give_the_same_prompts_in_the_same_order():
    first, second = create_source(Build(sums())), create_source(Build(sums()))
    assert [g[0].prompt for g in first.take(100)] == [g[0].prompt for g in second.take(100)]


def test_shuffled_epochs_hold_the_same_prompts_in_another_order():
    source = create_source(Build(sums(), data=DataSection(rollout_shuffle=True)))
    one = [g[0].prompt for g in source.take(len(source))]
    two = [g[0].prompt for g in source.take(len(source))]
    assert sorted(one) == sorted(two)
    assert one != two


def test_groups_have_rising_ids_and_own_their_lists():
    groups = create_source(Build(sums())).take(70)
    samples = [s for g in groups for s in g]
    assert [s.index for s in samples] == list(range(210))
    assert [s.group_index for s in samples] == [i // 3 for i in range(210)]
    samples[0].tokens.append(1)
    samples[0].metadata["gym"]["index"] = -1
    assert samples[1].tokens != samples[0].tokens
    assert samples[1].metadata["gym"]["index"] >= 0


def test_restored_source_goes_on_where_the_saved_one_stopped():
    build = Build(sums(), data=DataSection(rollout_shuffle=True))
    source = create_source(build)
    source.take(75)
    state = json.loads(json.dumps(source.state()))
    rest = [s.to_dict() for g in source.take(10) for s in g]
    other = create_source(build)
    other.restore(state)
    assert [s.to_dict() for g in other.take(10) for s in g] == rest


def test_evaluation_source_hands_out_the_held_out_problems_in_order():
    build = Build(sums(), eval=EvalSection(n_samples_per_eval_prompt=2), evaluation=True)
    source = create_source(build)
    groups = source.take(len(source))
    assert [len(g) for g in groups] == [2] * 128
    assert [g[0].prompt for g in groups] == [SHOTS + p.question for p in held_out_problems(sums())]
    assert groups[0][0].metadata["source_name"] == "chain_sum"


def test_chat_template_renders_the_prompt_as_one_user_message():
    data = DataSection(apply_chat_template=True, apply_chat_template_kwargs={"tail": "!"})
    section = sums(prompt_template="{question}")
    sample = create_source(Build(section, data=data)).take(1)[0][0]
    assert re.fullmatch(r"<user>\d [+-] \d =<assistant>!", sample.prompt)
    assert sample.tokens == list(sample.prompt.encode())


def test_prompts_over_the_length_limit_are_dropped():
    section = GymSection(task_args=ONE_DIGIT | {"max_terms": 3}, size=50, question_regex=r": (.*)")
    source = create_source(Build(section, data=DataSection(rollout_max_prompt_len=7)))  # "1 + 2 =" is 7 bytes
    assert 0 < len(source) < 50
    assert {len(g[0].tokens) for g in source.take(len(source))} == {7}


def test_a_length_limit_below_every_prompt_is_refused():
    with pytest.raises(DataError, match="rollout_max_prompt_len: all 68 gym prompts"):
        create_source(Build(sums(), data=DataSection(rollout_max_prompt_len=3)))


def test_files_of_prompts_are_refused_and_not_ignored():
    data = DataSection(data_source_path="gym", prompt_data=["mine.jsonl"])
    with pytest.raises(ConfigError, match="the data source 'gym' has prompts of its own"):
        create_source(Build(sums(), data=data))
    assert create_source(Build(sums(), data=data, evaluation=True))  # they are what is trained on


def test_what_is_said_of_evaluation_files_is_refused_and_not_ignored():
    given = {"eval_prompt_data": ["a", "a.jsonl"], "eval_config": "sets.toml", "eval_label_key": "answer"}
    section = EvalSection(eval_data_source_path="gym", eval_num_prompts=5, **given)
    with pytest.raises(ConfigError) as caught:
        create_source(Build(sums(), eval=section, evaluation=True))
    assert {problem.where for problem in caught.value.problems} == {
        "eval.eval_prompt_data", "eval.eval_config", "eval.eval_label_key", "eval.eval_num_prompts"
    }  # fmt: skip
    assert "wanted none: the data source 'gym' has prompts of its own; --eval-data-source-path file" in str(
        caught.value
    )
    assert create_source(Build(sums(), eval=section))  # trained on is something else


def test_held_out_problems_may_not_be_longer_than_evaluations_take():
    section = sums(task_args=ONE_DIGIT | {"max_terms": 3}, prompt_template="{question}", size=50)
    whole = create_source(Build(section, evaluation=True))
    source = create_source(Build(section, eval=EvalSection(eval_max_prompt_len=7), evaluation=True))
    assert 0 < len(source) < len(whole)
    assert {len(group[0].tokens) for group in source.take(len(source))} == {7}  # "1 + 2 =" is 7 bytes


def test_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(DataError, match="did you mean 'chain_sum'"):
        training_problems(GymSection(task="chain_sums"))


def test_wrong_task_option_is_refused_by_name():
    with pytest.raises(DataError, match=r"task_args: chain_sum refuses .*n_terms"):
        training_problems(GymSection(task_args={"n_terms": 2}))


def test_regex_that_does_not_match_names_the_question():
    with pytest.raises(DataError, match=r"question_regex: .* does not match the question 'State"):
        training_problems(GymSection(question_regex=r"^(\d)"))


@pytest.mark.parametrize("changes", [{"prompt_template": "no place"}, {"question_regex": "no group"}])
def test_settings_without_their_placeholder_are_refused(changes):
    with pytest.raises(ValidationError):
        GymSection(**changes)


def test_regex_that_cannot_be_compiled_is_a_settings_error():
    with pytest.raises(ValidationError, match="regular expression"):
        GymSection(question_regex="(")
