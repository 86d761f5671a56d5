"""Workers of rewards on a cluster: their end."""

from __future__ import annotations

import asyncio

import ray
from slime_ray.rewards import RayRewardWorkers, _Host


def test_workers_that_close_behind_the_trainer_which_left_the_cluster_join_no_other(monkeypatch, tmp_path):
    """`Run.close` closes the trainer first; a call of Ray that finds no cluster would join or start one."""
    begun = []
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: begun.append(kwargs))
    assert not ray.is_initialized()
    workers = RayRewardWorkers(
        None, size=1, lock=dict, options=[{}], log=lambda _: tmp_path, timeout_s=1.0, watch=list
    )
    workers._hosts = [_Host("reward host 0 of 1", object())]
    asyncio.run(workers.close())
    assert begun == [] and workers._hosts == []
