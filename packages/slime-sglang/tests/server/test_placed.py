"""A server at a place of a launcher's: what is started there, how its end is told, and where it may not be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import Site
from slime_core.runtime.processes.server_process import ServerProcess
from slime_sglang.server.command import HEALTH_TIMEOUT
from slime_sglang.server.managed import command_line, create_server
from slime_sglang.server.placed import PlacedServer
from slime_sglang.server.spanned import SpannedPlace
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings


class HerePlace:
    """A place on this host, which says that it is at another address, or is lost after its process has started."""

    def __init__(self, host: str = "127.0.0.1", *, is_lost: bool = False, address: str | None = None) -> None:
        self._site, self._is_lost = Site(host, (31, 32, 33), ("4", "5"), address), is_lost
        self.process: ServerProcess | None = None

    async def site(self) -> Site:
        return self._site

    async def start(self, command, environment, log) -> None:
        self.process = ServerProcess(command, environment=environment, log=log)
        await self.process.start()

    async def wait(self) -> int:
        status = await self.process.wait()
        if self._is_lost:
            raise EngineError("nobody answers")
        return status

    async def stacks(self) -> str:
        return await self.process.stacks()

    async def stop(self) -> None:
        await self.process.stop()

    async def kill(self) -> None:
        await self.process.kill()


def test_a_server_that_spans_two_machines_is_a_process_on_each_and_ends_with_either(tmp_path):
    places = [HerePlace("127.0.0.1", address="127.0.0.3"), HerePlace("127.0.0.2")]

    async def main():
        script = 'echo $CUDA_VISIBLE_DEVICES $SGLANG_HOST_IP "$@"; [ "$4" = 1 ] && exit 5; sleep 60'
        server = PlacedServer(
            SpannedPlace(places),
            lambda site: (["/bin/sh", "-c", script, "server"], {"SGLANG_HOST_IP": site.host}),
            log=tmp_path / "server.log",
            crosses_hosts=False,
            meets_others=False,
        )
        await server.start()
        assert server.address == "127.0.0.3:31"  # at which the second machine meets the first one
        assert await server.wait() == 5
        return server.failure

    failure = asyncio.run(main())
    assert places[0].process.failure is not None
    second = "4,5 127.0.0.2 --nnodes 2 --node-rank 1 --host 127.0.0.2 --port 31"
    assert (tmp_path / "server.log").read_text().strip() == "4,5 127.0.0.3 --nnodes 2 --node-rank 0"
    assert failure == (
        f"the SGLang server on 127.0.0.3 ended with status 5; its log is {tmp_path}/server-node-1.log and ends:\n{second}"
    )


class FullPlace(HerePlace):
    """A place at which a process is started whose start then fails."""

    async def start(self, command, environment, log) -> None:
        await super().start(command, environment, log)
        raise EngineError("no room")


def test_of_a_server_of_which_one_process_cannot_be_started_none_is_left(tmp_path):
    places = [HerePlace(), FullPlace("127.0.0.2"), HerePlace("127.0.0.3")]

    async def main():
        with pytest.raises(EngineError, match="no room"):
            await placed(places, tmp_path, "sleep 1000").start()
        return [place.process.failure is not None for place in places[:2]], places[2].process

    assert asyncio.run(main()) == ([True, True], None)


def test_a_server_that_spans_two_machines_is_not_started_where_its_weights_would_not_reach_the_second(
    tmp_path,
):
    places = [HerePlace(), HerePlace("192.0.2.1")]  # which is nobody's (RFC 5737)
    with pytest.raises(
        EngineError, match=r"the SGLang server on 192\.0\.2\.1: weights go by the memory of the host"
    ):
        asyncio.run(placed(places, tmp_path, "exit", crosses_hosts=False).start())
    assert [place.process for place in places] == [None, None]


def placed(places: HerePlace | list[HerePlace], folder: Path, script: str, **reach: bool) -> PlacedServer:
    """A server that is a shell script."""
    reach = {"crosses_hosts": True, "meets_others": False} | reach
    return PlacedServer(
        SpannedPlace([places] if isinstance(places, HerePlace) else places),
        lambda site: (["/bin/sh", "-c", script], {"AT": site.host}),
        log=folder / "log",
        **reach,
    )


def test_the_end_of_a_server_is_told_with_its_status_and_log(tmp_path):
    async def main():
        server = placed(HerePlace(), tmp_path, "echo at $AT; exit 3")
        assert server.failure is None
        await server.start()
        assert (server.address, server.bootstrap_address) == ("127.0.0.1:31", "127.0.0.1:32")
        assert await server.wait() == 3
        assert server.failure == (
            f"the SGLang server on 127.0.0.1 ended with status 3; its log is {tmp_path}/log and ends:\nat 127.0.0.1"
        )
        told = server.failure
        (tmp_path / "log").unlink()
        assert server.failure == told  # it is read once, however many requests are lost with it
        lost = placed(HerePlace(is_lost=True), tmp_path, "exit 3")
        await lost.start()
        assert await lost.wait() == -1
        assert lost.failure == "the SGLang server on 127.0.0.1 is lost: nobody answers"

    asyncio.run(main())


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_server_that_is_ended_has_ended(tmp_path, how):
    async def main():
        place = HerePlace()
        server = placed(place, tmp_path, "sleep 1000")
        await getattr(server, how)()  # before it is started
        await server.start()
        assert server.failure is None
        await getattr(server, how)()
        await getattr(server, how)()
        assert place.process.exit_status < 0
        assert server.failure is not None

    asyncio.run(main())


def test_a_server_on_a_host_that_weights_do_not_reach_is_not_started(tmp_path):
    place = HerePlace("192.0.2.1")  # which is nobody's (RFC 5737)
    why = r"the SGLang server on 192\.0\.2\.1: weights go by the memory of the host that the run was started on; give --update-weight-tr"
    with pytest.raises(EngineError, match=why):
        asyncio.run(placed(place, tmp_path, "exit", crosses_hosts=False).start())
    assert place.process is None


def test_a_server_that_exchanges_caches_with_others_listens_where_other_machines_reach_it(tmp_path):
    async def main():
        server = placed(HerePlace(address="127.0.0.3"), tmp_path, "echo at $AT", meets_others=True)
        await server.start()
        assert (server.address, server.bootstrap_address) == ("127.0.0.3:31", "127.0.0.3:32")
        await server.wait()

    asyncio.run(main())
    assert (tmp_path / "log").read_text() == "at 127.0.0.3\n"


def test_a_server_listens_at_its_machine_and_counts_its_own_gpus_alone(tmp_path):
    settings = ServerSettings(
        model_path=Path("m"), dtype="bfloat16", section=SglangSection(), folder=tmp_path, arguments={"tp_size": 2},
        n_ranks=2, releases_memory=True,
    )  # fmt: skip
    site = Site("10.0.0.2", (8000, 8001, 8002), ("4", "5"))
    command, _ = command_line(settings, site, key="k", device="cuda")
    words = " ".join(command)
    assert "--host 10.0.0.2 --port 8000" in words
    assert "--dist-init-addr 10.0.0.2:8002" in words
    assert "--tp-size 2" in words
    assert "--enable-memory-saver --enable-draft-weights-cpu-backup" in words
    assert "gpu-id" not in words
    assert "--device" not in words
    on_cpu = " ".join(command_line(settings, site, key="k", device="cpu")[0])
    assert "--device cpu" in on_cpu
    assert "memory-saver" not in on_cpu
    assert "backup" not in on_cpu


class Recording(HerePlace):
    """A place that starts nothing, and keeps what it was to start."""

    async def start(self, command, environment, log) -> None:
        self.words, self.environment = " ".join(command), environment

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("gpus", "visible", "on_cpu"), [(("4", "5"), "4,5", False), ((), "", True)], ids=["gpus", "cpu"]
)
def test_a_server_sees_the_gpus_of_its_place_and_computes_on_the_cpu_only_without(
    tmp_path, gpus, visible, on_cpu
):
    """Whatever the driver sees: on a machine without a GPU the first would silently be on the CPU."""

    async def main():
        place = Recording()
        place._site = replace(place._site, gpus=gpus)
        section = SglangSection()
        settings = ServerSettings(
            model_path=Path("m"), dtype="float32", section=section, folder=tmp_path, places=[place]
        )
        await create_server(settings, ports=(1, 2, 3), key="k").start()
        assert place.environment["CUDA_VISIBLE_DEVICES"] == visible
        assert ("--device cpu" in place.words) is on_cpu
        assert "--host 127.0.0.1 --port 31 " in place.words

    asyncio.run(main())


def test_a_server_at_a_place_gets_the_deadline_of_its_health_checks(monkeypatch, tmp_path):
    monkeypatch.delenv(HEALTH_TIMEOUT, raising=False)
    settings = ServerSettings(
        model_path=Path("m"),
        dtype="float32",
        section=SglangSection(),
        folder=tmp_path,
        places=[place := Recording()],
        health_timeout_s=120.0,
    )
    asyncio.run(create_server(settings, ports=(1, 2, 3), key="k").start())
    assert place.environment[HEALTH_TIMEOUT] == "120"
