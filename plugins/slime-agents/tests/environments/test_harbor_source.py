"""The data source `harbor`: which folders are trained on, and which are evaluated."""

from types import SimpleNamespace

import pytest
from slime_agents.environments.harbor.source import create_source
from slime_core.config.sections import DataSection, EvalSection, RolloutSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError
from slime_core.testing.contracts.environments import _Bytes


@pytest.fixture
def source(tmp_path):
    """Return the source over two folders of tasks; evaluated is what `given` says."""
    for name in ("train/add", "test/mul", "test/sub"):
        (tmp_path / name / "tests").mkdir(parents=True)
        for file, text in {"task.toml": "", "instruction.md": name, "tests/test.sh": "true"}.items():
            (tmp_path / name / file).write_text(text)

    def made(*, evaluation: bool, **given):
        sections = {
            "data": DataSection(data_source_path="harbor", prompt_data=[str(tmp_path / "train")]),
            "eval": EvalSection(eval_data_source_path="harbor", **given),
            "rollout": RolloutSection(rollout_batch_size=1, rollout_max_response_len=8),
        }
        settings = Settings(sections, {}, {})
        return create_source(SimpleNamespace(settings=settings, tokenizer=_Bytes(), evaluation=evaluation))

    return made


def taken(source):
    return [(one.metadata.get("source_name"), one.prompt) for [one] in source.take(len(source))]


def test_evaluations_take_the_tasks_of_their_own_folders(source, tmp_path):
    given = {"eval_prompt_data": ["held-out", str(tmp_path / "test")]}
    assert taken(source(evaluation=False, **given)) == [(None, "train/add")]
    assert taken(source(evaluation=True, **given)) == [("held-out", "test/mul"), ("held-out", "test/sub")]
    assert taken(source(evaluation=True, eval_num_prompts=1, **given)) == [("held-out", "test/mul")]


def test_tasks_that_are_trained_on_are_not_evaluated_unasked(source):
    with pytest.raises(ConfigError, match=r"eval_prompt_data: found \[\]; wanted a name and the folder"):
        source(evaluation=True)


def test_what_is_said_of_files_is_refused(source, tmp_path):
    given = {"eval_prompt_data": ["held-out", str(tmp_path / "test")]}
    with pytest.raises(ConfigError, match=r"eval.eval_input_key: found 'q'; wanted none"):
        source(evaluation=True, eval_input_key="q", **given)
