"""What of the cluster is too small for a run, before it is asked for."""

from __future__ import annotations

import contextlib

import pytest
from slime_core.errors import ConfigError
from slime_ray.placement.plan import Needs, make_plan
from slime_ray.placement.room import check_reward_room, check_room, sizes


def nodes(*cores: int) -> list[dict]:
    return [{"Alive": True, "Resources": {"CPU": float(number)}} for number in cores]


def test_more_machines_for_rewards_than_there_are_is_refused_with_what_there_is():
    gone = {"Alive": False, "Resources": {"CPU": 64.0}}
    check_reward_room(2, 3, nodes(4, 3), taken=[1])
    with pytest.raises(ConfigError) as caught:
        check_reward_room(2, 3, [*nodes(4, 2), gone], taken=[1])
    assert [str(problem) for problem in caught.value.problems] == [
        "ray.reward_num_nodes x reward.reward_workers: found 2 x 3, and a Ray cluster whose machines have 4, 2 CPUs, of which "
        "ranks and servers take 1; wanted 2 machines with 3 CPUs; choose fewer, or join a larger cluster by --ray-address"
    ]


@pytest.mark.parametrize(
    ("n_hosts", "cores", "taken", "fits"),
    [
        (2, 16, (8, 8), False),
        (1, 16, (8,), True),  # on the other machine
        (2, 16, (8,), False),
        (2, 8, (8, 8), True),
        (2, 9, (8, 4), False),
    ],
)
def test_machines_for_rewards_have_their_cores_beside_those_of_ranks(n_hosts, cores, taken, fits):
    refused = contextlib.nullcontext() if fits else pytest.raises(ConfigError)
    with refused:
        check_reward_room(n_hosts, cores, nodes(16, 16), taken=taken)


def test_a_gpu_without_a_core_for_it_is_none():
    """As in a pod of 8 GPUs and 4 cores."""
    resources = [{"CPU": 4.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 2.0}, {"CPU": 64.0}]
    assert sizes([{"Alive": True, "Resources": own} for own in resources], "GPU") == [4, 2, 0]


def test_fewer_gpus_than_all_roles_take_are_refused_with_what_each_takes():
    needs = Needs(1, 4, pools={"critic": (1, 2), "ref": (1, 3)})
    plan = make_plan(needs, gpus_per_node=8)
    check_room(needs, plan, [8, 4], "GPU")
    with pytest.raises(ConfigError) as caught:
        check_room(needs, plan, [8], "GPU")
    assert [str(problem) for problem in caught.value.problems] == [
        "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node: found 1 x 4, critic ranks of 1 x 2, ref ranks of 1 x 3, and a Ray "
        "cluster whose machines have 8 GPUs with a core for each; wanted machines with 6, 3 GPUs; choose fewer, or join a larger cluster by --ray-address"
    ]
