"""`AddressBook`: where rewards find the servers of a model that is not the policy, while they come and go."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import ConfigError
from slime_core.rundir.served_models import key_of, resolve_url
from slime_sglang.engine import SglangEngine
from slime_sglang.fleet.address_book import AddressBook
from slime_sglang.fleet.replica import Replica
from slime_sglang.fleet.supervisor import EngineSupervisor
from slime_sglang.settings.section import FleetSection, SglangSection
from slime_sglang.settings.server import ServerSettings

from ..fake_fleet import WATCHED, until
from ..fake_worker import KEY, FakeWorker

pytestmark = pytest.mark.timeout(120)


def test_rewards_find_the_servers_that_there_are(model_path, tmp_path):
    def served():
        return resolve_url("served:judge", tmp_path)

    async def scenario():
        workers = [FakeWorker(model_path) for _ in range(3)]
        for worker in workers:
            await worker.start()
        first, second, spare = (f"http://{worker.address}" for worker in workers)

        def replica(number):
            def make(before):
                engine = SglangEngine(
                    ServerSettings(
                        model_path=model_path,
                        dtype="float32",
                        section=SglangSection(staging_dir=tmp_path, request_retries=0),
                        folder=tmp_path,
                        name=f"judge-{number}-{before}",
                        address=workers[number + 2 * before].address,
                        key=KEY,
                    )
                )
                engine.is_external = number == 1  # which is not replaced
                return engine

            return Replica(f"judge {number}", make, restarts=1)

        section = FleetSection(**WATCHED | {"rollout_health_check_interval": 0.1})
        supervisor = EngineSupervisor(
            [replica(0), replica(1)], section=section, registry=AddressBook(tmp_path, "judge")
        )
        try:
            await supervisor.start()
            assert served() == [first, second]
            assert key_of("served:judge/v1", tmp_path) == KEY
            await workers[0].stop()
            await until(lambda: served() == [second, spare])
            await workers[1].stop()
            await until(lambda: served() == [spare])
            await supervisor.close()
            with pytest.raises(ConfigError):
                served()
        finally:
            await supervisor.close()
            for worker in workers:
                await worker.close()

    asyncio.run(scenario())
