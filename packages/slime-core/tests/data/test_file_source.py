"""The source `file`: groups of a file's rows, their order, and evaluation sets."""

from types import SimpleNamespace

import pytest
from slime_core.config.sections import DataSection, EvalSection, RolloutSection
from slime_core.config.settings import Settings
from slime_core.data.file_source import create_source
from slime_core.errors import DataError
from slime_core.plugins.registry import Registry

from ..byte_tokenizer import ByteTokenizer
from .conftest import write_rows


def source_of(*, evaluation=False, rollout=None, **settings):
    sections = {
        "data": DataSection(
            **{key: value for key, value in settings.items() if not key.startswith(("eval", "n_"))}
        ),
        "eval": EvalSection(
            **{key: value for key, value in settings.items() if key.startswith(("eval", "n_"))}
        ),
        "rollout": RolloutSection(rollout_batch_size=1, rollout_max_response_len=8, **(rollout or {})),
    }
    return create_source(
        SimpleNamespace(
            settings=Settings(sections, {}, {}),
            registry=Registry([]),
            tokenizer=ByteTokenizer(),
            evaluation=evaluation,
        )
    )


def test_the_file_source_hands_out_groups_of_its_rows(tmp_path, caplog):
    path = write_rows(
        tmp_path / "train.jsonl", [{"q": "one", "a": 1}, {"q": "three", "a": 3}, {"q": "two", "a": 2}]
    )
    source = source_of(
        prompt_data=path,
        input_key="q",
        label_key="a",
        rollout_max_prompt_len=3,
        rollout={"n_samples_per_prompt": 2},
    )
    groups = source.take(3)
    assert [[s.label for s in group] for group in groups] == [["1", "1"], ["2", "2"], ["1", "1"]]
    assert "dropped 1 of 3 prompts" in caplog.text


def test_the_file_source_shuffles_by_the_rollout_seed(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"input": f"prompt {i}"} for i in range(30)])

    def order(seed):
        source = source_of(prompt_data=path, rollout_shuffle=True, rollout={"rollout_seed": seed})
        return [group[0].prompt for group in source.take(30)]

    assert order(1) == order(1) != order(2)


def test_evaluation_reads_its_own_sets_in_order_with_their_names(tmp_path):
    easy = write_rows(tmp_path / "easy.jsonl", [{"input": "1+1"}, {"input": "2+2"}, {"input": "3+3"}])
    hard = write_rows(tmp_path / "hard.jsonl", [{"input": "17*23"}])
    source = source_of(
        evaluation=True,
        prompt_data="not read",
        rollout_shuffle=True,
        rollout_max_prompt_len=3,
        eval_prompt_data=["easy", easy, "hard", f"{hard}@[:1]"],
        eval_num_prompts=2,
        n_samples_per_eval_prompt=3,
    )
    groups = source.take(len(source))
    assert [(g[0].metadata["source_name"], g[0].prompt) for g in groups] == [
        ("easy", "1+1"),
        ("easy", "2+2"),
        ("hard", "17*23"),
    ]
    assert {len(group) for group in groups} == {3}


def test_evaluation_leaves_out_prompts_that_are_too_long(tmp_path):
    easy = write_rows(tmp_path / "easy.jsonl", [{"input": "1+1"}, {"input": "17*23"}, {"input": "3+3"}])
    hard = write_rows(tmp_path / "hard.jsonl", [{"input": "2^2"}])
    given = {"evaluation": True, "eval_prompt_data": ["easy", easy, "hard", hard]}
    source = source_of(**given, eval_max_prompt_len=3, n_samples_per_eval_prompt=2)
    assert [group[0].prompt for group in source.take(len(source))] == ["1+1", "3+3", "2^2"]
    with pytest.raises(DataError, match="all 4 held-out prompts have more than eval_max_prompt_len 2 tokens"):
        source_of(**given, eval_max_prompt_len=2)


def test_messages_that_nobody_rendered_have_no_length_to_evaluate_by(tmp_path):
    rows = [{"input": [{"role": "user", "content": "1+1"}]}]
    path = write_rows(tmp_path / "chat.jsonl", rows)
    given = {"evaluation": True, "eval_prompt_data": ["chat", path]}
    told = r"chat.jsonl:1: chat messages that are not rendered have no length .* eval_max_prompt_len 2; set apply"
    with pytest.raises(DataError, match=told):
        source_of(**given, eval_max_prompt_len=2)
    assert len(source_of(**given)) == 1


@pytest.mark.parametrize("pairs", [[], ["easy"], ["easy", "a.jsonl", "easy", "b.jsonl"]])
def test_evaluation_sets_are_names_and_files_in_turn(pairs):
    with pytest.raises(DataError, match="wanted names and files in turn"):
        source_of(evaluation=True, eval_prompt_data=pairs)


def test_no_data_file_is_an_error():
    with pytest.raises(DataError, match=r"data.prompt_data: found nothing"):
        source_of()
