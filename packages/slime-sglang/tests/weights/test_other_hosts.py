"""A real server that shares a disk with the run's host and no memory: what reaches it, and what does not."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams
from slime_core.runtime.processes.ports import ReservedPort
from slime_core.runtime.processes.server_process import ServerProcess
from slime_core.weights.sync import sync_weights
from slime_models.family.families.llama import LLAMA
from slime_sglang.engine import SglangEngine
from slime_sglang.http.api_key import KEY_VARIABLE, new_key
from slime_sglang.server.command import server_command, server_environment
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import LOADERS
from slime_sglang.weights.receiver import create_receiver

from ..sender import Sender

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
#: Runs a command where the folder that is its first word is another's, of the same name, as memory of another host is.
ELSEWHERE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none "$0" && exec "$@"',
]


async def is_ready(server, url):
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as reply:
                    if reply.status == 200:
                        return
            assert server.failure is None, server.failure
            await asyncio.sleep(0.2)


def sender_of(model):
    return Sender({name: parameter.detach() for name, parameter in model.named_parameters()})


def test_weights_reach_a_host_that_shares_a_disk_and_no_memory(
    model, model_path, tiny_llama, log_probs_of, tmp_path
):
    memory, held, key = tmp_path / "memory", ReservedPort(), new_key()
    port = held.number
    memory.mkdir()
    section = SglangSection(staging_dir=memory, start_timeout_s=600)
    arguments = [
        "--custom-weight-loader", *LOADERS, "--max-total-tokens", "1024", "--max-running-requests", "4",
    ]  # fmt: skip
    server = ServerProcess(
        [
            *ELSEWHERE,
            str(memory),
            *server_command(model_path, port=port, dtype="float32", arguments=arguments),
        ],
        environment=server_environment() | {"HF_HUB_OFFLINE": "1", KEY_VARIABLE: key},
        log=tmp_path / "server.log",
    )
    engine = SglangEngine(
        ServerSettings(
            model_path=model_path,
            dtype="float32",
            section=section,
            folder=tmp_path,
            address=f"127.0.0.1:{port}",
            key=key,
        ),
        receiver=create_receiver(
            model_path,
            LLAMA,
            dtype="float32",
            section=section,
            registry=Registry(),
            disk_dir=tmp_path / "weights",
        ),
    )

    async def check_serves(wanted):
        answer = await engine.generate(PROMPT, GREEDY)
        log_probs, likeliest = log_probs_of(wanted, PROMPT, answer.tokens)
        assert answer.tokens == likeliest
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)
        return answer.weight_version

    async def scenario():
        await server.start()
        await is_ready(server, f"http://127.0.0.1:{port}/health")
        await engine.start()
        for number, transport in ((1, "disk"), (2, "nccl")):
            sent = sender_of(tiny_llama(number))
            await sync_weights(sent, engine, version=str(number), timeout_s=240, transport=transport)
            assert await check_serves(tiny_llama(number)) == str(number)
        for transport in ("memory", "distributed", "disk-delta"):
            work = sync_weights(sender_of(model), engine, version="3", timeout_s=240, transport=transport)
            with pytest.raises(
                WeightSyncError, match=rf"{memory}/\S+: the server's host does not see this folder"
            ):
                await work
            assert await check_serves(tiny_llama(2)) == "2"

    async def whole():
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(server.stop)
            stack.push_async_callback(engine.close)
            await scenario()

    asyncio.run(whole())
    held.release()
    assert list(tmp_path.glob("verdict-*")) == []
