"""A model that is not the policy: its servers are where rewards are told, while they come and go."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import ConfigError
from slime_core.served import key_of, resolve_url
from slime_sglang.addresses import AddressBook
from slime_sglang.engine import SglangEngine
from slime_sglang.keeper import Keeper
from slime_sglang.seat import Seat
from slime_sglang.section import FleetSection, SglangSection

from .fake_fleet import WATCHED, until
from .fake_worker import KEY, FakeWorker

pytestmark = pytest.mark.timeout(120)


def test_rewards_find_the_servers_that_there_are(model_path, tmp_path):
    def served():
        return resolve_url("served:judge", tmp_path)

    async def scenario():
        workers = [FakeWorker(model_path) for _ in range(3)]
        for worker in workers:
            await worker.start()
        first, second, spare = (f"http://{worker.address}" for worker in workers)

        def seat(number):
            def make(before):
                engine = SglangEngine(
                    model_path,
                    dtype="float32",
                    section=SglangSection(staging_dir=tmp_path, request_retries=0),
                    folder=tmp_path,
                    name=f"judge-{number}-{before}",
                    address=workers[number + 2 * before].address,
                    key=KEY,
                )
                engine.is_external = number == 1  # which is not replaced
                return engine

            return Seat(f"judge {number}", make, restarts=1)

        section = FleetSection(**WATCHED | {"rollout_health_check_interval": 0.1})
        keeper = Keeper([seat(0), seat(1)], section=section, register=AddressBook(tmp_path, "judge"))
        try:
            await keeper.start()
            assert served() == [first, second]
            assert key_of("served:judge/v1", tmp_path) == KEY
            await workers[0].stop()
            await until(lambda: served() == [second, spare])
            await workers[1].stop()
            await until(lambda: served() == [spare])
            await keeper.close()
            with pytest.raises(ConfigError):
                served()
        finally:
            await keeper.close()
            for worker in workers:
                await worker.close()

    asyncio.run(scenario())
