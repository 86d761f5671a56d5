"""Our numbers against verl's, TRL's and OpenRLHF's, which were frozen so that no peer need be installed."""

import json
from pathlib import Path

import pytest
import torch
from slime_bench.conformance.case import Case
from slime_bench.conformance.command import PEERS
from slime_bench.conformance.rows import LIMIT, Difference

GOLDEN = json.loads((Path(__file__).parent / "conformance.json").read_text())
ROWS = {f"{peer}: {row.name}": row for peer, rows in PEERS.items() for row in rows()}


def test_every_row_that_must_agree_is_frozen():
    assert set(GOLDEN["rows"]) == {name for name, row in ROWS.items() if row.differs is None}


@pytest.mark.parametrize("name", GOLDEN["rows"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_are_the_peers(name, dtype):
    ours = ROWS[name].ours(Case.random(GOLDEN["seed"], dtype)).detach()
    theirs = torch.tensor(GOLDEN["rows"][name], dtype=torch.float64)
    assert Difference(ours, theirs).relative <= LIMIT


def test_padding_and_its_inverse_agree():
    case = Case.random(3)
    assert torch.equal(case.flat(case.padded(case.advantages)), case.advantages)
    assert case.padded(torch.ones_like(case.advantages)).sum().item() == len(case.advantages)


def test_difference_is_relative_to_the_largest_value():
    assert Difference(torch.tensor([1.0, 200.0]), torch.tensor([2.0, 200.0])).relative == pytest.approx(
        1 / 200
    )
