"""Chat messages without a chat template: refused before a run begins, where the generator does not render them."""

from __future__ import annotations

import json

import pytest
from slime_core.data.make_source import make_eval_source, make_source
from slime_core.errors import DataError
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_context
from slime_core.testing.contracts.runs import tabular_settings

REGISTRY = Registry()
CHAT = {"input": [{"role": "user", "content": "a"}], "label": "x"}


@pytest.fixture
def built(tmp_path):
    """Build a source, of training or of the set `held`, of a row of text and one of chat messages."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ({"input": "a", "label": "x"}, CHAT)))

    def build(held_out: bool, *flags: str):
        words = (
            ("--eval-prompt-data", "held", str(file), "--eval-interval", "1")
            if held_out
            else ("--prompt-data", str(file))
        )
        make = make_eval_source if held_out else make_source
        with tabular_settings(REGISTRY, *words, *flags) as settings:
            return make(make_context(settings, REGISTRY))

    return build


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("generator", ["single-turn", "slime-core/multi-turn"])
def test_chat_messages_are_refused_by_row_where_the_generator_begins_with_ids(built, generator, held_out):
    with pytest.raises(DataError) as caught:
        built(held_out, "--custom-generate-function-path", generator)
    (said,) = str(caught.value).splitlines()
    assert f"rows.jsonl:2: found chat messages, which the generator {generator} does not render" in said
    assert "give --apply-chat-template" in said


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(
    "flags", [("--custom-generate-function-path", "os:getcwd"), ("--apply-chat-template",)]
)
def test_chat_messages_are_taken_where_something_renders_them_or_may(built, flags, held_out):
    assert len(built(held_out, *flags)) == 2


def test_the_rollout_of_supervised_training_takes_chat_messages(built):
    assert len(built(False, "--rollout-function-path", "sft")) == 2


def test_a_set_with_a_generator_of_its_own_may_have_chat_messages(built, tmp_path):
    config = tmp_path / "sets.toml"
    rows = json.dumps(str(tmp_path / "rows.jsonl"))
    text = f'[[eval.datasets]]\nname = "own"\npath = {rows}\n'
    flags = ("--eval-config", str(config), "--eval-interval", "1")
    config.write_text(text + 'custom_generate_function_path = "os:getcwd"\n')
    with tabular_settings(REGISTRY, *flags) as settings:
        assert len(make_eval_source(make_context(settings, REGISTRY))) == 2
    config.write_text(text)
    with (
        tabular_settings(REGISTRY, *flags) as settings,
        pytest.raises(DataError, match=r"rows.jsonl:2: found chat"),
    ):
        make_eval_source(make_context(settings, REGISTRY))
