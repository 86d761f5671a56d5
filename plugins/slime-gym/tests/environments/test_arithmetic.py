"""Arithmetic of a policy: values worked out by hand, and what is refused."""

import pytest
from slime_gym.environments.arithmetic import evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        (" 2 + 3 * 4 ", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("10 ** 100 - 10 ** 100", "0"),
    ],
)
def test_values(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("", "not an expression"),
        ("12 *", "not an expression"),
        ("((((" * 30, "not an expression"),
        ("\0", "not an expression"),
        ("1" * 201, "more than 200 characters"),
        ("9 ** 9 ** 9", "a power that is too large"),
        ("2 ** 0.5", "a power that is too large, or no whole one"),
        ("9" * 180, "too large"),
        ("x + 1", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("1 << 3", "only numbers"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression, why):
    with pytest.raises(ValueError, match=why):
        evaluate(expression)
