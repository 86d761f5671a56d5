"""What of the cluster is too small for a run, before it is asked for."""

from __future__ import annotations

import pytest
from slime_core.errors import ConfigError
from slime_ray.placement import _check_reward_room


def nodes(*cores: int) -> list[dict]:
    return [{"Alive": True, "Resources": {"CPU": float(number)}} for number in cores]


def test_more_machines_for_rewards_than_there_are_is_refused_with_what_there_is():
    gone = {"Alive": False, "Resources": {"CPU": 64.0}}
    _check_reward_room(2, 3, nodes(4, 3))
    with pytest.raises(ConfigError) as caught:
        _check_reward_room(2, 3, [*nodes(4, 2), gone])
    assert [str(problem) for problem in caught.value.problems] == [
        "ray.reward_num_nodes x reward.reward_workers: found 2 x 3, and a Ray cluster whose machines have 4, 2 CPUs; wanted "
        "2 machines with 3 CPUs; choose fewer, or join a larger cluster by --ray-address"
    ]
