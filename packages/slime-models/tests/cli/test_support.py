"""What `slime models support` says of a family: what it declares, and what tests prove."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slime_core.errors import ContractError
from slime_models.cli.models import main
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.proofs import proofs_of
from slime_models.family.support import FEATURES, proven, support_of, table


def test_a_family_of_another_package_says_what_it_has_no_reason_against():
    family = replace(QWEN3, model_type="of_a_stranger", not_served={"sglang": "never tried"})
    found = {feature: (each.answer, each.why) for feature, each in support_of(family).items()}
    assert found.keys() == FEATURES.keys()
    assert found["sglang"] == ("no", "never tried")
    assert found["mtp"] == found["expert"] == ("none", None)  # dense, without such layers
    assert {found[feature][0] for feature in FEATURES.keys() - {"sglang", "mtp", "expert"}} == {"says"}


def test_what_no_test_proves_is_open():
    assert "train" in proven()["qwen3"]
    family = replace(GLM4_MOE, not_parallel={"context": "no reason", "pipeline": "no reason"})
    answers = {feature: each.answer for feature, each in support_of(family).items()}
    assert answers["mtp"] == "yes"
    assert answers["context"] == answers["pipeline"] == "no"
    assert {answers[feature] for feature in FEATURES.keys() - proven()["glm4_moe"]} <= {"open", "no", "none"}
    rows, notes = table([family])
    assert notes == ["no reason"]
    assert rows[1][1 + list(FEATURES).index("context")] == "no (1)"


class Item:
    """What is read of a test."""

    nodeid = "test_x"

    def __init__(self, *marks, gpu=False, **params):
        self.marks, self.gpu, self.callspec = marks, gpu, type("Call", (), {"params": params})

    def iter_markers(self, name):
        return [type("Mark", (), {"args": args}) for args in self.marks]

    def get_closest_marker(self, name):
        return self.gpu or None


def test_marks_name_a_family_or_the_parameter_that_is_one():
    items = [
        Item(("qwen3", "train", "expert")),
        Item(("{kind}", "lora"), kind="glm4"),
        Item(("{kind}", "expert"), kind="qwen3_moe"),
        Item(("qwen3", "sglang"), gpu=True),
    ]
    assert proofs_of(items) == {"qwen3": {"train"}, "glm4": {"lora"}, "qwen3_moe": {"expert"}}


@pytest.mark.parametrize("mark", [("qwen33", "train"), ("qwen3", "training")])
def test_a_mark_that_names_nothing_is_refused(mark):
    with pytest.raises(
        ContractError, match=f"test_x: proves.*: found .*{mark[0] if mark[0] != 'qwen3' else mark[1]}"
    ):
        proofs_of([Item(mark)])


def test_the_command_prints_the_families_that_are_asked_for(capsys):
    assert main(["support", "qwen3"]) == 0
    heading, row, *_ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["family", *FEATURES]
    assert row.split()[:2] == ["qwen3", "yes"]
