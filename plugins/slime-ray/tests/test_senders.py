"""Which ranks of the trainer send weights, and what each is told, with answers in the place of processes."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.protocols import TrainerCapabilities, TransferPlan
from slime_ray.trainer import RayTrainer

#: What each of four ranks of two pipeline stages says, on two machines.
STAGES, MACHINES = [0, None, 1, None], [0, None, None, 1]


class Ranks:
    """Answers as the actors of ranks do: a rank's fingerprint is of a tensor of its own."""

    def __init__(self):
        self.asked, self.words = [], []

    def of_machines(self, role):
        return MACHINES

    async def ask(self, method, *args, role=None):
        self.asked.append((method, *args))
        return STAGES

    async def ask_each(self, method, words, *, role=None):
        self.words = words
        return [{f"of rank {rank}": rank} for rank in range(len(words))]


def sent(senders, *, stage_senders=True, n_updates=1):
    """Send; returns the ranks, the fingerprints, and (number or None, how many send) that each rank was told."""
    ranks = Ranks()
    capabilities = TrainerCapabilities(stage_senders=stage_senders)
    trainer = RayTrainer(None, capabilities=capabilities, placement=None, ranks=ranks)
    trainer._is_started = True
    plan = TransferPlan(transport="t", version="1", dtype="float32", senders=senders, channel="there")
    for _ in range(n_updates):
        fingerprints = asyncio.run(trainer.send(plan))
    return ranks, fingerprints, [(own.sender if sends else None, own.n_senders) for own, sends in ranks.words]


@pytest.mark.parametrize(
    ("senders", "numbers"),
    [("first", [0, None, None, None]), ("each_machine", MACHINES), ("each_stage", STAGES)],
)
def test_who_sends(senders, numbers):
    _, fingerprints, told = sent(senders)
    count = len(numbers) - numbers.count(None)
    assert told == [(number, count) for number in numbers]
    assert fingerprints == {
        f"of rank {rank}": rank for rank, number in enumerate(numbers) if number is not None
    }


def test_ranks_are_asked_once_which_of_them_send_their_stage():
    ranks, _, _ = sent("each_stage", n_updates=2)
    assert ranks.asked == [("call", "stage_sender")]


def test_rank_0_sends_all_where_the_trainer_knows_no_stages():
    ranks, _, told = sent("each_stage", stage_senders=False)
    assert told == [(0, 1), (None, 1), (None, 1), (None, 1)]
    assert not ranks.words[0][0].sends_stage_alone
    assert ranks.asked == []
