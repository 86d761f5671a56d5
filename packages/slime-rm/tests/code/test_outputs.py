"""Whether an output is the wanted one."""

from slime_rm.code.outputs import same_text, same_value


def test_decimals_are_compared_to_a_tolerance_and_whole_numbers_exactly():
    assert same_value([0.1 + 0.2, {"a": 1 / 3}], [0.3, {"a": 0.333333}])
    assert not same_value(3.0000001, 3)
    assert not same_value(10**400, 1.5)
    assert not same_value(float("nan"), 0.5)
    assert same_text("0.30000000000000004 3\n", "0.3 3")
    assert not same_text("0.3 3.0", "0.3 3")
    assert not same_text("0.3", "0.3\n0.3")
