"""Why two answers are the same."""

from slime_core.samples import Sample
from slime_rm.math.deepscaler import deepscaler
from slime_rm.math.same_answer import compare


def test_details_say_what_was_found_and_why():
    assert compare("4", "2+2") == "same meaning"
    assert compare("4", "4.") == "same writing"
    assert compare("Evelyn", r"\text{evelyn}") == "same words"
    assert compare("4", "5") == "different"
    assert compare("4", " ") == "empty"
    grade = deepscaler(Sample(response=r"\boxed{2+2}", label="4"))
    assert grade.details == {"answer": "2+2", "why": "same meaning"}
