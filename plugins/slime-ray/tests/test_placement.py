"""What of the cluster is too small for a run, before it is asked for."""

from __future__ import annotations

import pytest
from slime_core.errors import ConfigError
from slime_ray.placement import _check_reward_room, _check_room
from slime_ray.plan import Needs, make_plan


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


def test_fewer_gpus_than_all_roles_take_are_refused_with_what_each_takes():
    needs = Needs(1, 4, pools={"critic": (1, 2), "ref": (1, 3)})
    plan = make_plan(needs, gpus_per_node=8)
    _check_room(needs, plan, [8, 4], "GPU")
    with pytest.raises(ConfigError) as caught:
        _check_room(needs, plan, [8], "GPU")
    assert [str(problem) for problem in caught.value.problems] == [
        "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node: found 1 x 4, critic ranks of 1 x 2, ref ranks of 1 x 3, and a Ray "
        "cluster whose machines have 8 GPUs; wanted machines with 6, 3 GPUs; choose fewer, or join a larger cluster by --ray-address"
    ]
