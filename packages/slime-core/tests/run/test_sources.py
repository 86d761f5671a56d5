"""Data sources as a run is to have them: rows that the rollout `sft` could not train on are refused before it starts."""

from __future__ import annotations

import json

import pytest
from slime_core.errors import DataError
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_context
from slime_core.run.sources import make_sources
from slime_core.testing.contracts.runs import tabular_settings

REGISTRY = Registry()


def asked(content: str, **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


def answered(content: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture
def sources(tmp_path):
    """Return a function that builds the sources of a run of `sft` over rows; a row is a list of messages, or a text."""

    def built(*prompts: object, label: str | None = None, flags: tuple[str, ...] = ()):
        rows = [
            {"input": prompt} if label is None else {"input": prompt, "label": label} for prompt in prompts
        ]
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--prompt-data", str(tmp_path / "chats.jsonl"), "--rollout-function-path", "sft", *flags]
        if label is None:
            words += ["--label-key", "none"]
        with tabular_settings(REGISTRY, *words) as settings:
            return make_sources(make_context(settings, REGISTRY))

    return built


def refusal(sources, *prompts: object, **how: object) -> str:
    with pytest.raises(DataError) as raised:
        sources(*prompts, **how)
    return str(raised.value)


GOOD = [asked("ab"), answered("c")]


def test_conversations_with_an_answer_are_taken(sources):
    source, held_out = sources(GOOD, [asked("a"), answered("b"), asked("c"), answered("d")])
    assert (len(source), held_out) == (2, None)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([asked("a")], "the conversation has no assistant's message to train on"),
        ([asked("a"), answered("b", step_loss_mask=0)], "the conversation has no assistant's message to train on"),
        ([answered("a"), asked("b")], "the conversation begins with the assistant"),
        ([asked("a"), answered("b", step_loss_mask="no")], "message 1: step_loss_mask is 'no'; wanted 0 or 1"),
    ],
)  # fmt: skip
def test_the_last_row_is_named_where_nothing_of_it_can_be_trained_on(sources, tmp_path, messages, why):
    assert refusal(sources, GOOD, GOOD, messages).startswith(f"{tmp_path}/chats.jsonl:3: {why}")


def test_an_answer_that_the_template_renders_otherwise_is_seen_beforehand(sources, tmp_path):
    """With `distill_qwen` an answer is text as it is."""
    parts = [asked("a"), answered([{"type": "text", "text": "b"}])]
    told = refusal(sources, GOOD, parts, flags=("--loss-mask-type", "distill_qwen"))
    assert told == f"{tmp_path}/chats.jsonl:2: message 1: content is list; wanted text"


def test_an_answer_has_to_begin_within_the_context(sources, tmp_path):
    """A letter is a token: two are asked before the answer."""
    bounded = ("--rollout-max-context-len", "2")
    told = refusal(sources, [asked("a"), answered("b")], GOOD, flags=bounded)
    assert told.startswith(f"{tmp_path}/chats.jsonl:2: no answer begins within 2 tokens and after the first")
    assert len(sources(GOOD, flags=("--rollout-max-context-len", "3"))[0]) == 1


def test_a_text_needs_a_label(sources, tmp_path):
    assert refusal(sources, "ab").startswith(f"{tmp_path}/chats.jsonl:1: the prompt is text and has no label")
    assert len(sources("ab", label="c")[0]) == 1
    told = refusal(sources, "ab", label="c", flags=("--rollout-max-context-len", "2"))
    assert told.startswith(f"{tmp_path}/chats.jsonl:1: no answer begins within 2 tokens")


def test_of_many_rows_the_first_five_are_named(sources):
    *lines, last = refusal(sources, *([asked("a")] for _ in range(7))).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["1", "2", "3", "4", "5"]
    assert last == "and 2 rows more"


def test_rows_without_an_answer_are_prompts_for_other_rollouts(sources):
    flags = ("--rollout-function-path", "default", "--apply-chat-template")
    assert len(sources([asked("a")], flags=flags)[0]) == 1
