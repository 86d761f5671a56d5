"""Every grader against verdicts decided by hand: `verdicts.jsonl`, one case a line; "error" is the verdict on bad data."""

import json
from collections import Counter
from pathlib import Path

import importlib_metadata
import pytest
from slime_core.errors import SampleError
from slime_core.rewards.results import plain_value, score_of
from slime_core.samples import Sample

CASES = [json.loads(line) for line in Path(__file__).with_name("verdicts.jsonl").read_text().splitlines()]
GRADERS = {
    point.name: point.load()
    for point in importlib_metadata.entry_points(group="slime.rewards")
    if point.dist.name == "slime-rm" and point.name in {case["grader"] for case in CASES}
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['grader']}-{case['kind']}")
def test_verdict_is_the_one_decided_by_hand(case):
    sample = Sample(
        index=0, response=case["response"], label=case["label"], metadata=case.get("metadata", {})
    )
    if case["verdict"] == "error":
        with pytest.raises(SampleError, match=r"^sample 0: "):
            GRADERS[case["grader"]](sample, **case.get("options", {}))
        return
    value = plain_value(GRADERS[case["grader"]](sample, **case.get("options", {})))
    assert score_of(value) == pytest.approx(case["verdict"], abs=1e-12), value


def test_there_are_a_thousand_different_cases():
    different = {json.dumps(case | {"verdict": None}, sort_keys=True) for case in CASES}
    assert len(different) == len(CASES) >= 1000


def test_every_class_has_twenty_cases_right_and_wrong():
    classes = Counter(case["class"] for case in CASES)
    assert {name: count for name, count in classes.items() if count < 20} == {}
    verdicts = {(case["class"], case["verdict"] == 1.0) for case in CASES}
    assert verdicts == {(name, right) for name in classes for right in (True, False)}


def test_every_class_of_mathematics_has_as_many_right_cases_as_wrong_ones():
    """As many: at least two in five of each, so that neither accepting nor refusing all is a good grader."""
    mathematics = [case for case in CASES if case["grader"] in ("math", "math_verify", "deepscaler")]
    sizes = Counter(case["class"] for case in mathematics)
    right = Counter(case["class"] for case in mathematics if case["verdict"] == 1.0)
    assert min(sizes.values()) >= 20
    assert all(0.4 <= right[kind] / size <= 0.6 for kind, size in sizes.items())
