"""Which machine and which GPUs each process gets, against tables made by hand."""

from __future__ import annotations

import pytest
from slime_core.errors import ConfigError
from slime_core.protocols import EngineGpus, GpuRange
from slime_ray.placement.plan import Needs, make_plan, table


def servers(*sizes: int, unused: int = 0) -> EngineGpus:
    """Servers of so many GPUs each, in a row, and as many unused GPUs after them."""
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return EngineGpus(sum(sizes) + unused, tuple(map(GpuRange, firsts, sizes)))


#: nodes, ranks a node, engine, colocate, GPUs a node; and machines, (machine, GPU) of each rank, (machine, GPUs) of each server.
TABLE = {
    "4 + 4 apart": (
        (1, 4, servers(1, 1, 1, 1), False, 8),
        (8,), [(0, 0), (0, 1), (0, 2), (0, 3)], [(0, (4,)), (0, (5,)), (0, (6,)), (0, (7,))],
    ),
    "4 + 4 apart, servers of 2": (
        (1, 4, servers(2, 2), False, 8),
        (8,), [(0, 0), (0, 1), (0, 2), (0, 3)], [(0, (4, 5)), (0, (6, 7))],
    ),
    "8 colocated": (
        (1, 8, servers(4, 2, 1, 1), True, 8),
        (8,), [(0, n) for n in range(8)], [(0, (0, 1, 2, 3)), (0, (4, 5)), (0, (6,)), (0, (7,))],
    ),
    "a machine that trains, and one that serves": (
        (1, 4, servers(2, 2), False, 4),
        (4, 4), [(0, 0), (0, 1), (0, 2), (0, 3)], [(1, (0, 1)), (1, (2, 3))],
    ),
    "2 nodes x 4 colocated": (
        (2, 4, servers(2, 2, 4), True, 4),
        (4, 4), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)],
        [(0, (0, 1)), (0, (2, 3)), (1, (0, 1, 2, 3))],
    ),
    "2 nodes x 2, servers after the ranks of both": (
        (2, 2, servers(1, 2, 1), False, 4),
        # One server beside the first ranks; that of 2 GPUs finds one left there and goes on to the next machine.
        (3, 4, 1), [(0, 0), (0, 1), (1, 0), (1, 1)], [(0, (2,)), (1, (2, 3)), (2, (0,))],
    ),
    "no server on a device": ((2, 1, EngineGpus(), True, 8), (1, 1), [(0, 0), (1, 0)], []),
    "as many as it needs": ((1, 2, servers(1, 1), False, None), (4,), [(0, 0), (0, 1)], [(0, (2,)), (0, (3,))]),
    "GPUs that are left unused are nobody's": (
        (1, 1, EngineGpus(4, (GpuRange(1), GpuRange(2))), False, 8),
        (5,), [(0, 0)], [(0, (2,)), (0, (3,))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_every_process_is_where_the_table_has_it(name):
    (nodes, per_node, engine, colocate, size), machines, ranks, placed = TABLE[name]
    plan = make_plan(Needs(nodes, per_node, engine, colocate), gpus_per_node=size)
    assert plan.gpus == machines
    assert [(slot.machine, *slot.gpus) for slot in plan.ranks] == ranks
    assert [(slot.machine, slot.gpus) for slot in plan.servers.values()] == placed
    assert list(plan.servers) == [process.first for process in engine.processes]


@pytest.mark.parametrize(
    ("needs", "size", "message"),
    [
        (
            Needs(1, 8),
            4,
            "cluster.actor_num_gpus_per_node: found 8, with 4 GPUs a machine; wanted at most 4",
        ),
        (
            Needs(1, 4, servers(8)),
            4,
            "cluster.num_gpus_per_node: found 8 GPUs of one server, with 4 GPUs a machine; wanted at most 4; a process of a server is on one",
        ),
        (
            Needs(1, 8, servers(2, 2), colocate=True),
            8,
            "cluster.colocate: found it, 8 GPUs of the trainer and 4 of the engine; wanted as many of both",
        ),
        (
            Needs(2, 2, servers(4), colocate=True),
            8,
            "cluster.colocate: found a server of GPUs 0 to 3, with 2 ranks a machine; wanted servers of which none",
        ),
    ],
)
def test_what_fits_no_machine_is_refused(needs, size, message):
    with pytest.raises(ConfigError) as caught:
        make_plan(needs, gpus_per_node=size)
    (problem,) = caught.value.problems
    assert str(problem).startswith(message)


def test_no_gpu_is_given_twice_unless_the_engine_is_colocated():
    for nodes in (1, 2, 3):
        for per_node in (1, 2, 3):
            for sizes in ((1,), (2, 1, 2), (3, 3), (1, 1, 1, 2)):
                plan = make_plan(Needs(nodes, per_node, servers(*sizes, unused=1)), gpus_per_node=3)
                slots = [*plan.ranks, *plan.servers.values()]
                given = [(slot.machine, gpu) for slot in slots for gpu in slot.gpus]
                assert len(set(given)) == len(given) == nodes * per_node + sum(sizes)
                assert all(gpu < plan.gpus[machine] <= 3 for machine, gpu in given)


#: What the engine has, colocate, GPUs a node of 1 x 2 ranks; and the lines.
LINES = {
    "apart, a server and a judge of two GPUs, one left alone": (
        EngineGpus(4, (GpuRange(0, 1, "policy 0"), GpuRange(2, 2, "judge 0"))), False, 4,
        ["machine 0, 4 GPUs: 0 rank 0; 1 rank 1; 2 policy 0; 3 nobody", "machine 1, 2 GPUs: 0 judge 0; 1 judge 0"],
    ),
    "colocated": (
        EngineGpus(2, (GpuRange(0, 1, "policy 0"), GpuRange(1, 1))), True, 2,
        ["machine 0, 2 GPUs: 0 rank 0 and policy 0; 1 rank 1 and server 1"],
    ),
    "an engine without servers": (EngineGpus(), False, None, ["machine 0, 2 GPUs: 0 rank 0; 1 rank 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_the_table_says_who_is_on_each_gpu(name):
    engine, colocate, size, lines = LINES[name]
    needs = Needs(1, 2, engine, colocate)
    assert table(needs, make_plan(needs, gpus_per_node=size)) == lines


#: nodes, ranks a node, pools, engine, colocate, GPUs a node; and machines, (machine, GPU) of the pools' ranks, (machine, GPUs) of servers.
POOLS = {
    "4 + 4 of one machine": (
        (1, 4, {"critic": (1, 4)}, EngineGpus(), False, 8), (8,), [(0, 4), (0, 5), (0, 6), (0, 7)], [],
    ),
    "servers follow the critic": (
        (1, 2, {"critic": (1, 2)}, servers(2, 2), False, 8), (8,), [(0, 2), (0, 3)], [(0, (4, 5)), (0, (6, 7))],
    ),
    "colocated servers have the policy's GPUs alone": (
        (1, 4, {"critic": (1, 4)}, servers(2, 2), True, 8), (8,), [(0, 4), (0, 5), (0, 6), (0, 7)], [(0, (0, 1)), (0, (2, 3))],
    ),
    "a machine that has no room for it": (
        (1, 8, {"ref": (1, 4)}, servers(4), False, 8), (8, 8), [(1, 0), (1, 1), (1, 2), (1, 3)], [(1, (4, 5, 6, 7))],
    ),
    "two machines of it, of which the first is the policy's": (
        (1, 2, {"critic": (2, 2)}, servers(1), False, 4), (4, 3), [(0, 2), (0, 3), (1, 0), (1, 1)], [(1, (2,))],
    ),
    "a critic, then a reference; colocated servers have neither's GPUs": (
        (1, 4, {"critic": (1, 2), "ref": (1, 2)}, servers(2, 2), True, 8),
        (8,), [(0, 4), (0, 5), (0, 6), (0, 7)], [(0, (0, 1)), (0, (2, 3))],
    ),
    "a reference goes where the critic has left room, servers follow both": (
        # The critic's two do not fit beside three ranks; the reference's one does.
        (1, 3, {"critic": (1, 2), "ref": (1, 1)}, servers(2), False, 4), (4, 4), [(1, 0), (1, 1), (0, 3)], [(1, (2, 3))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_roles_with_ranks_of_their_own_have_gpus_that_nobody_else_has(name):
    (nodes, per_node, pools, engine, colocate, size), machines, pooled, placed = POOLS[name]
    needs = Needs(nodes, per_node, engine, colocate, pools)
    plan = make_plan(needs, gpus_per_node=size)
    assert plan.gpus == machines
    assert [(slot.machine, *slot.gpus) for slot in plan.ranks[needs.num_ranks :]] == pooled
    assert [(slot.machine, slot.gpus) for slot in plan.servers.values()] == placed
    assert sum(plan.gpus) == needs.num_gpus


@pytest.mark.parametrize("role", ["critic", "ref"])
def test_a_pool_that_no_machine_has_room_for_is_refused(role):
    with pytest.raises(
        ConfigError, match=rf"cluster\.{role}_num_gpus_per_node: found 8, with 4 GPUs a machine"
    ):
        make_plan(Needs(1, 4, pools={role: (1, 8)}), gpus_per_node=4)


def test_the_table_names_the_ranks_of_each_role():
    needs = Needs(1, 2, servers(1, 1), colocate=True, pools={"critic": (1, 2), "ref": (1, 1)})
    assert table(needs, make_plan(needs)) == [
        "machine 0, 5 GPUs: 0 rank 0 and server 0; 1 rank 1 and server 1; 2 critic 0; 3 critic 1; 4 ref 0"
    ]
