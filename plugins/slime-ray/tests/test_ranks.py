"""What the driver knows of where ranks are."""

from __future__ import annotations

from pathlib import Path

from slime_ray.trainer.rank import RankAddress
from slime_ray.trainer.ranks import Member, RankActors


def test_the_first_rank_on_each_machine_has_its_number():
    nodes = ["a", "b", "b", "a", "c"]
    members = [Member(None, f"rank {number}", Path()) for number in range(len(nodes))]
    ranks = RankActors([*members, Member(None, "critic rank 0", Path(), "critic")])
    ranks.found([RankAddress("10.0.0.1", node, 1) for node in [*nodes, "d"]], "10.0.0.2")
    assert ranks.of_machines("policy") == [0, 1, None, None, 2]
    assert ranks.of_machines("critic") == [0]
