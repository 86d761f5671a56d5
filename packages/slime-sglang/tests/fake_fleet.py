"""A fleet over fake workers, and what tests ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from inspect import getcoroutinelocals
from pathlib import Path
from typing import Any

from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams
from slime_core.testing.tabular import LetterTokenizer
from slime_models.tensor_spec import Spec
from slime_models.transfer.receiver import UpdateReceiver
from slime_models.transfer.storage import UpdateStorage
from slime_sglang.engine import SglangEngine
from slime_sglang.fleet.fleet import EngineFleet
from slime_sglang.fleet.replica import Replica
from slime_sglang.fleet.router import Router
from slime_sglang.settings.section import FleetSection, SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.settings.topology import Role

from .fake_worker import KEY, TOKENS_OF_ANSWER, FakeWorker

PARAMS = SamplingParams(max_new_tokens=TOKENS_OF_ANSWER)
PROMPTS = [[number, 7] for number in range(12)]
#: Checks come when something is suspected, and otherwise so seldom that none does. What is well has time to answer.
WATCHED = {
    "use_fault_tolerance": True,
    "rollout_health_check_interval": 500,
    "rollout_health_check_timeout": 30,
}
#: For what hangs. It is found by a deadline, which whatever is well has to meet, also on a busy machine.
HANGING = WATCHED | {"rollout_health_check_interval": 0.2, "rollout_health_check_timeout": 5}


@asynccontextmanager
async def _opened(
    model_path: Path,
    folder: Path,
    *,
    routed: str | None,
    spare: bool,
    restarts: int,
    roles: Sequence[Role],
    settings: dict[str, Any],
) -> AsyncIterator[tuple[Any, ...]]:
    n_engines = len(roles)
    workers = [FakeWorker(model_path) for _ in range(n_engines + spare)]
    for worker in workers:
        await worker.start()
    section = SglangSection(staging_dir=folder, request_retries=0, control_timeout_s=10)
    fleet = FleetSection(
        rollout_external_engine_addrs=[worker.address for worker in workers[:n_engines]], **settings
    )

    def engine_of(number, before):
        engine = SglangEngine(
            ServerSettings(
                model_path=model_path,
                dtype="float32",
                section=section,
                folder=folder,
                name=f"server-{number}-{before}",
                address=workers[n_engines if before else number].address,
                key=KEY,
                role=roles[number],
            )
        )
        engine.is_external = not spare  # one that is, is not replaced
        return engine

    def replica(number):
        return Replica(f"engine {number}", partial(engine_of, number), restarts=restarts)

    engine = EngineFleet(
        [replica(number) for number in range(n_engines)],
        section=fleet,
        receiver=UpdateReceiver(
            UpdateStorage(
                specs={"a": Spec(shape=(2, 3), dtype="float32"), "b": Spec(shape=(4,), dtype="float32")},
                model_path=model_path,
                staging_dir=folder,
                disk_dir=folder / "weights",
                keep_files=False,
                encoding="xor",
                timeout_s=10,
            ),
            dtype="float32",
            registry=Registry(),
        ),
        tokenizer=LetterTokenizer(),
        start_patience_s=60,
        router=Router(routed, address=(None, None), width=64, section=section, folder=folder)
        if routed
        else None,
    )
    try:
        await engine.start()
        yield engine, *workers
    finally:
        await engine.close()
        for worker in workers:
            await worker.close()


def run_fleet(
    model_path: Path,
    folder: Path,
    scenario: Callable[..., Awaitable[Any]],
    *,
    routed: str | None = None,
    spare: bool = False,
    restarts: int = 1,
    roles: Sequence[Role] = ("regular", "regular"),
    **settings: Any,
) -> Any:
    """Run a scenario with a started fleet over fake workers, one for each role, and return what it returns.

    With `spare`, a third one takes the place of one that is lost, up to `restarts` times.
    """

    async def within() -> Any:
        opened = _opened(
            model_path,
            folder,
            routed=routed,
            spare=spare,
            restarts=restarts,
            roles=roles,
            settings=settings,
        )
        async with asyncio.timeout(100), opened as started:
            return await scenario(*started)

    return asyncio.run(within())


async def generate_all(engine, prompts=PROMPTS, **options):
    return await asyncio.gather(*(engine.generate(prompt, PARAMS, **options) for prompt in prompts))


def right(answers, prompts=PROMPTS):
    return [answer.tokens for answer in answers] == [[sum(p) % 100] * TOKENS_OF_ANSWER for p in prompts]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def tokens_so_far(task):
    """The tokens that have arrived of a response, which a task of its own has a fleet generate."""
    if task.done():
        return task.result().tokens
    response = getcoroutinelocals(task.get_coro()).get("response")
    return [] if response is None else response.completion("none").tokens


async def begun(fleet, prompts, params, n_tokens=1):
    """Ask for responses at once; return a task for each when that many tokens of it have arrived."""
    tasks = [asyncio.create_task(fleet.generate(prompt, params)) for prompt in prompts]
    await until(lambda: all(len(tokens_so_far(task)) >= n_tokens for task in tasks))
    return tasks
