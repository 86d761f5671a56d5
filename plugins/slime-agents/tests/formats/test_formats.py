"""What a format writes it reads again, over all values that JSON has; what is no call is text, or malformed, and never raises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_agents.formats.calls import Malformed, ToolCall
from slime_agents.formats.glm import Glm
from slime_agents.formats.hermes import Hermes
from slime_agents.formats.llama import Llama
from slime_agents.formats.untyped import with_text

FORMATS = [Hermes(), Glm(), Llama()]
# Tags within values are the model's own mistake: no format escapes them.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.text("abc_", min_size=1, max_size=5)
CALLS = st.lists(
    st.builds(
        ToolCall, st.sampled_from(["look", "run-code", "x"]), st.dictionaries(KEYS, VALUES, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@given(calls=CALLS)
@settings(max_examples=100)
def test_a_format_reads_what_it_writes(form, calls):
    assert list(form.read(form.write(calls)).calls) == calls


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@given(pieces=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": ', '"x"', "<arg_key>", "</arg_key>", "<arg_value>", "}", "[", "\n", "look", "<|python_tag|>", "\x00", "é"]), max_size=12))  # fmt: skip
@settings(max_examples=100)
def test_nothing_that_a_model_writes_makes_a_format_raise(form, pieces):
    for call in form.read("".join(pieces)).calls:
        assert isinstance(call, ToolCall) or call.why


def test_text_beside_calls_is_what_is_said():
    spoken = Hermes().read('I look.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>\nDone.')
    assert spoken.content == "I look.\n\nDone."
    assert Hermes().read("  no call ").content == "  no call "
    assert Llama().read('{"answer": 42}').calls == ()
    assert Llama().read('Well: <|python_tag|>{"name": "look", "parameters": {"a": 1}}').content == "Well:"


def test_values_of_xml_are_json_where_they_are_and_text_over_lines_else():
    text = "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>a = 1\n\n  b</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    assert Glm().read(text).calls == (ToolCall("run", {"code": "a = 1\n\n  b", "n": 7}),)
    (twice,) = (
        Glm()
        .read(
            "<tool_call>run<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"
        )
        .calls
    )
    assert isinstance(twice, Malformed)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "2024", "2024"),
        ({"type": "string"}, "007.50", "007.50"),
        ({"type": "string"}, "1.50", "1.50"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, '"2024"', "2024"),  # as the format itself writes it
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": "integer"}, "2024", 2024),
        ({"type": ["string", "number"]}, "2024", 2024),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 1]}, "1", 1),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {}]}, "5", 5),
        ({}, "5", 5),
        ("no schema", "5", 5),
    ],
)
def test_a_value_of_xml_is_text_where_the_schema_has_text_alone(schema, written, value):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": schema}}}}
    text = f"<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    (call,) = with_text(Glm().read(text).calls, [{"type": "function"}, tool])
    assert (type(call.arguments["at"]), call.arguments["at"]) == (type(value), value)
