"""What a format writes it reads again, over all values that JSON has; what is no call is text, or malformed, and never raises."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slime_agents.formats.calls import Malformed, ToolCall
from slime_agents.formats.glm import Glm
from slime_agents.formats.hermes import Hermes
from slime_agents.formats.llama import Llama
from slime_agents.formats.qwen3_coder import Qwen3Coder
from slime_agents.formats.untyped import typed

FORMATS = [Hermes(), Glm(), Llama()]
ALL = [*FORMATS, Qwen3Coder()]
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


#: Types of JSON's values, as a schema names them.
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def tools_of(calls):
    """Return tools that take what calls give them, each argument of one type; None where two calls differ."""
    properties = {}
    for call in calls:
        for key, value in call.arguments.items():
            if properties.setdefault((call.name, key), TYPES[type(value)]) != TYPES[type(value)]:
                return None
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {
            key: {"type": kind} for (of, key), kind in properties.items() if of == name
        }}}}
        for name in {call.name for call in calls}
    ]  # fmt: skip


@given(calls=CALLS)
@settings(max_examples=200)
def test_functions_are_read_as_they_were_written_with_the_types_of_their_tools(calls):
    tools = tools_of(calls)
    assume(tools is not None)
    read = typed(Qwen3Coder().read(Qwen3Coder().write(calls)).calls, tools)
    assert list(read) == calls
    for before, after in zip(calls, read, strict=True):
        assert list(map(type, before.arguments.values())) == list(map(type, after.arguments.values()))


@pytest.mark.parametrize("form", ALL, ids=lambda form: type(form).__name__)
@given(pieces=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<function=x>", "</function>", "<parameter=a>", "</parameter>", '{"name": ', '"x"', "<arg_key>", "</arg_key>", "<arg_value>", "}", "[", "\n", "look", "<|python_tag|>", "\x00", "é"]), max_size=12))  # fmt: skip
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


LOOK = "<tool_call>\n<function=look>\n"


def test_values_of_functions_are_text_over_lines_without_a_schema():
    text = f"I look.\n{LOOK}<parameter=code>\na = 1\n\n  b\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    spoken = Qwen3Coder().read(text)
    assert (spoken.content, spoken.calls) == (
        "I look.",
        (ToolCall("look", {"code": "a = 1\n\n  b", "n": "7"}),),
    )
    for empty in ("", "\n", "\n\n"):
        (call,) = Qwen3Coder().read(f"{LOOK}<parameter=a>{empty}</parameter></function></tool_call>").calls
        assert call == ToolCall("look", {"a": ""})
    assert Qwen3Coder().read("<tool_call><function=look></function>").calls == (ToolCall("look", {}),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call></tool_call>", "found no <function=NAME> after <tool_call>"),
        ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "found no <function=NAME> after <tool_call>"),
        (f"{LOOK}<parameter=a>\n1\n</function>\n</tool_call>", "after look and its 0 parameters comes '<parameter=a>"),
        (f"{LOOK}<parameter=a>\n1\n</parameter>\n</tool_call>", "after look and its 1 parameters comes ''; wanted pairs of"),
        (f"{LOOK}a: 1\n</function>\n</tool_call>", "after look and its 0 parameters comes 'a: 1"),
        (f"{LOOK}</function>\n<function=x>\n</function>\n</tool_call>", "comes '</function>\\n<function=x>"),
        (f"{LOOK}" + "<parameter=a>\n1\n</parameter>\n" * 2 + "</function>\n</tool_call>", "look is given 'a' twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_function_is_told(text, why):
    (call,) = Qwen3Coder().read(text).calls
    assert isinstance(call, Malformed)
    assert why in call.why


PLACE = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/Place"}}}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "2024", "2024"),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"x"', '"x"'),
        ({"type": "integer"}, "2024", 2024),
        ({"type": "integer"}, " 7 ", 7),
        ({"type": "integer"}, "7.5", "7.5"),  # which the schema refuses, and the model is told
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, "2.50", 2.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),  # as Qwen's templates write it
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a']", "['a']"),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": "object"}, '"{}"', '"{}"'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "number"]}, "2024", 2024),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Place"}]}, '{"inner": {}}', {"inner": {}}),
        ({"$ref": "#/$defs/Place"}, '{"inner": {}}', {"inner": {}}),
        ({"allOf": [{"$ref": "#/$defs/Place"}], "description": "where"}, "{}", {}),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/$defs/None"}, "5", "5"),
        ({"$ref": "https://example.org/place.json"}, "5", "5"),
        ({}, "5", "5"),
        ("no schema", "5", "5"),
    ],
)
def test_a_value_of_a_function_has_the_type_of_the_schema(schema, written, value):
    definitions = {"Place": PLACE, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}}
    parameters = {"properties": {"at": schema}, "$defs": definitions}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    text = f"{LOOK}<parameter=at>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = typed(Qwen3Coder().read(text).calls, [{"type": "function"}, tool])
    assert (type(call.arguments["at"]), call.arguments["at"]) == (type(value), value)
    (call,) = typed(Qwen3Coder().read(text).calls, [])
    assert call.arguments["at"] == written


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
    (call,) = typed(Glm().read(text).calls, [{"type": "function"}, tool])
    assert (type(call.arguments["at"]), call.arguments["at"]) == (type(value), value)
