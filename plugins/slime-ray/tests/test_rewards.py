"""Workers of rewards on a cluster: their end, and starts that fail where they were lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys

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


#: A reward that does not import the first time.
FLAKY = """
from pathlib import Path

broken = Path(__file__).with_name("broken")
if broken.exists():
    broken.unlink()
    raise RuntimeError("the disk is away")


def score(sample):
    return 1.0
"""
#: Asks two hosts, which are here and no actors, and whose processes have just taken the places of lost ones.
ASKS = """
import asyncio, pickle, sys
from pathlib import Path
from types import SimpleNamespace
from slime_ray.launcher import set_environment
set_environment()
from slime_core.rewards.workers.wire import Setup
from slime_core.samples import Sample
from slime_ray.process.surroundings import Surroundings
from slime_ray.rewards import RayRewardWorkers, RewardHost, _Host

folder = Path(sys.argv[1])
setup = Setup(
    reference="flaky_scores:score", options={}, timeout_s=60.0, start_timeout_s=100.0, memory_bytes=None
)

def host(number):
    own = RewardHost(Surroundings(folder, (str(folder),), {}, folder / "log", 1), setup, 1)
    calls = {name: SimpleNamespace(remote=getattr(own, name)) for name in ("answer", "start_again")}
    return _Host(f"host {number}", SimpleNamespace(**calls))

async def main():
    workers = RayRewardWorkers(setup, size=1, lock=list, options=[], log=Path, timeout_s=100.0, watch=list)
    workers._hosts = hosts = [host(0), host(1)]
    answers = [await workers.answer(pickle.dumps(Sample()))]
    asked = [[host.asked for host in hosts]]
    await hosts[0].coming_back
    answers.append(await workers.answer(pickle.dumps(Sample())))
    asked.append([host.asked for host in hosts])
    scores = [answer["outcomes"][0]["value"] for answer in answers]
    (folder / "told").write_text(f"{scores} {asked}")

asyncio.run(main())
"""


def test_a_host_whose_workers_do_not_start_again_is_done_without_until_they_do(tmp_path):
    (tmp_path / "flaky_scores.py").write_text(FLAKY)
    (tmp_path / "broken").touch()
    subprocess.run([sys.executable, "-c", ASKS, str(tmp_path)], check=True, timeout=200)
    # The first call went to host 0, then to host 1; the next one to host 0, which had waited longer.
    assert (tmp_path / "told").read_text() == "[1.0, 1.0] [[1, 2], [3, 2]]"
    log = (tmp_path / "log").read_text()
    assert "host 0 was lost (slime_core.errors.PluginError: reward flaky_scores:score: does not import" in log
    assert "host 0 is back" in log
