"""JSON that somebody wrote is read strictly, and what is wrong is said in one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_core.files.json_text import MAX_DEPTH, is_deep, parse_json, shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * 900 + "]" * 900, "nested deeper"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested deeper"),
        ("9" * 5000, "a whole number of thousands of digits"),
        ("-" + "9" * 5000, "a whole number of thousands of digits"),
        ("1e999", "beyond any float"),
        ("NaN", "no number of JSON"),
        ("[-Infinity]", "no number of JSON"),
        ('"\\ud800"', "half of a character"),
        ('{"\\udfff": 1}', "half of a character"),
        ('{"a": 1, "a": 1}', "the key 'a' twice"),
        ('[{"b": {"a": 1, "c": 2, "a": 3}}]', "the key 'a' twice"),
        ("", "Expecting value"),
        ("{'a': 1}", "property name"),
        ("[1] x", "Extra data"),
        ("\x00", "Expecting value"),
    ],
)
def test_what_is_no_json_is_refused_with_why(text, why):
    with pytest.raises(ValueError, match=why) as caught:
        parse_json(text)
    assert type(caught.value) is not RecursionError
    assert len(str(caught.value)) < 200


def test_nesting_up_to_the_limit_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert not is_deep(parse_json(text))
    with pytest.raises(ValueError, match="nested"):
        parse_json(f"[{text}]")


def test_a_pair_of_surrogates_is_a_character():
    assert parse_json('"\\ud83d\\ude00"') == "😀"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_json_writes_is_read_as_it_was(value):
    assert parse_json(json.dumps(value)) == value


def test_a_value_is_shown_short_whatever_it_is():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, 10**5000, "x" * 10_000, {"a": 10**5000}):
        assert len(shown(value)) < 100
