"""A reward of your own: is the first number of the response the label?"""

import re

from slime_core.rewards.results import Grade
from slime_core.samples import Sample


def first_number(sample: Sample) -> Grade:
    """Return 1.0 for the right number, 0.1 for another one, 0.0 for none, and why."""
    found = re.search(r"-?\d+", sample.response)
    if found is None:
        return Grade(score=0.0, details={"reason": "there is no number"})
    score = 1.0 if found[0] == sample.label else 0.1
    return Grade(score=score, details={"reason": f"the first number is {found[0]}"})
