"""Kit of engines: behaviour over the protocol, on an engine of the caller's, small enough to answer at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

from slime_core.errors import EngineError
from slime_core.protocols import (
    Completion,
    EngineCapabilities,
    EngineLoad,
    Fingerprint,
    ReportsLoad,
    RolloutEngine,
    SamplingParams,
    TransferPlan,
)
from slime_core.samples import STATUS_OF_FINISH
from slime_core.testing.contracts.promises import answering, refusing, require, run_within

#: What a trainer's `send` is.
Send = Callable[[TransferPlan], Awaitable[Fingerprint]]


def check_engine(
    create: Callable[[], RolloutEngine],
    *,
    prompt: Sequence[int] = (1, 2, 3),
    send: Send | None = None,
    long: int = 64,
    heeds_seeds: bool = True,
) -> None:
    """Check an engine from `start` to the second `close`: load, answers, seeds, abort, pause, refusals, weights, memory.

    Args:
        create: builds it, not started.
        prompt: ids that its model has.
        send: plays the trainer in weight updates, by the engine's first transport; none is made without it.
        long: tokens of a response that is aborted midway; no more than the context has room for.
        heeds_seeds: whether draws depend on the seed alone, as the protocol says.

    Raises:
        ContractError: says which promise is broken.
    """
    run_within("engine", _check(create, list(prompt), send, long, heeds_seeds))


async def _check(
    create: Callable[[], RolloutEngine], prompt: list[int], send: Send | None, long: int, heeds_seeds: bool
) -> None:
    with answering("engine", "one that is built, not started"):
        engine = create()
    where = f"engine {type(engine).__name__}"
    missing = [name for name in _MEMBERS if not hasattr(engine, name)]
    require(not missing, where, found=f"no {', '.join(missing)}", wanted="every method of RolloutEngine")
    before = engine.capabilities
    known = isinstance(before, EngineCapabilities)
    require(known, where, found=f"capabilities of {type(before).__name__}", wanted="EngineCapabilities")
    try:
        with answering(where, "an engine that starts"):
            await engine.start()
        if before.reports_load:
            await _load(where, engine)
        same = engine.capabilities == before
        require(same, f"{where}: start", found="other capabilities than before", wanted="the same")
        if before.transports:
            await _answers(where, engine, prompt, heeds_seeds)
            await _control(where, engine, prompt, long)
            await _weights(where, engine, prompt, send)
        else:
            refused = engine.generate(prompt, SamplingParams(max_new_tokens=1))
            await refusing(f"{where}: generate without transports", refused, EngineError)
    finally:
        with answering(f"{where}: close", "that it may be called twice"):
            await engine.close()
            await engine.close()


async def _load(where: str, engine: RolloutEngine) -> None:
    """Check what an engine that has nothing to do says of its load, also while it is paused."""
    where = f"{where}: current_load"
    with answering(where, "an EngineLoad"):
        loads = [await cast(ReportsLoad, engine).current_load()]
        if engine.capabilities.transports:
            await engine.pause()
            loads.append(await cast(ReportsLoad, engine).current_load())
            await engine.resume()
    for load in loads:
        check_load(where, load)
        idle = (load.running, load.queued) == (0, 0)
        require(idle, where, found=f"{load} before the first request", wanted="none running or queued")
    fell = loads[-1].retractions < loads[0].retractions
    require(not fell, where, found="retractions that fall", wanted="those since the start")


def check_load(where: str, load: EngineLoad) -> None:
    """Check one reading of an engine's load: shares and counts that can be.

    Raises:
        ContractError: says which promise is broken.
    """
    require(isinstance(load, EngineLoad), where, found=type(load).__name__, wanted="an EngineLoad")
    usage = load.kv_cache_usage
    is_share = isinstance(usage, int | float) and 0.0 <= usage <= 1.0
    require(is_share, where, found=f"kv_cache_usage {usage!r}", wanted="a share from 0 to 1")
    counts = {"running": 0, "queued": 0, "retractions": 0, "replicas": 1}
    for name, least in counts.items():
        count = getattr(load, name)
        fits = isinstance(count, int) and count >= least
        require(fits, where, found=f"{name} {count!r}", wanted=f"a whole number of at least {least}")


_MEMBERS = (
    "capabilities", "start", "generate", "abort", "pause", "resume", "offload", "onload", "open_update", "receive", "close",
)  # fmt: skip


async def _answers(where: str, engine: RolloutEngine, prompt: list[int], heeds_seeds: bool) -> None:
    params = SamplingParams(max_new_tokens=6, seed=11)
    others = [replace(params, seed=seed) for seed in range(3)]
    with answering(f"{where}: generate", "a completion"):
        alone = await engine.generate(prompt, params)
        together = await asyncio.gather(*(engine.generate(prompt, each) for each in [*others, params]))
        greedy = [await engine.generate(prompt, replace(params, temperature=0.0)) for _ in range(2)]
    for answer in (alone, *together, *greedy):
        check_completion(f"{where}: generate", answer, params)
        require(answer.finish_reason != "abort", where, found="abort, unasked", wanted="stop or length")
    wanted = "the same tokens for the same seed, prompt and weights"
    found = f"{alone.tokens} alone and {together[-1].tokens} beside others"
    require(alone.tokens == together[-1].tokens or not heeds_seeds, where, found=found, wanted=wanted)
    found = f"{greedy[0].tokens} and {greedy[1].tokens} at temperature 0"
    require(greedy[0].tokens == greedy[1].tokens, where, found=found, wanted=wanted)
    await refusing(f"{where}: generate of no ids", engine.generate([], params), EngineError)


def check_completion(where: str, answer: Completion, params: SamplingParams) -> None:
    """Check one answer: lengths that agree, log-probs that can be, and why it ended.

    Raises:
        ContractError: says which promise is broken.
    """
    require(isinstance(answer, Completion), where, found=type(answer).__name__, wanted="a Completion")
    n, wanted = len(answer.tokens), f"at most {params.max_new_tokens} tokens"
    require(n <= params.max_new_tokens, where, found=f"{n} tokens", wanted=wanted)
    require(
        len(answer.log_probs) == n,
        where,
        found=f"{len(answer.log_probs)} log_probs for {n}",
        wanted="one each",
    )
    ids = all(isinstance(token, int) and token >= 0 for token in answer.tokens)
    require(ids, where, found=f"the tokens {answer.tokens}", wanted="ids")
    fit = all(math.isfinite(value) and value <= 1e-4 for value in answer.log_probs)
    require(fit, where, found=f"the log_probs {answer.log_probs}", wanted="finite numbers of at most 0")
    reason, reasons = answer.finish_reason, ", ".join(STATUS_OF_FINISH)
    require(reason in STATUS_OF_FINISH, where, found=f"finish_reason {reason!r}", wanted=f"one of {reasons}")
    full = reason != "length" or n == params.max_new_tokens
    require(full, where, found=f"finish_reason length after {n} tokens", wanted=f"{params.max_new_tokens}")
    require(reason == "abort" or n > 0, where, found=f"no token and {reason!r}", wanted="one at least")
    version = answer.weight_version
    require(isinstance(version, str), where, found=f"weight_version {version!r}", wanted="text")


async def _control(where: str, engine: RolloutEngine, prompt: list[int], long: int) -> None:
    params = SamplingParams(max_new_tokens=long, min_new_tokens=long, seed=3)
    with answering(f"{where}: abort", "the partial output and finish_reason abort"):
        tasks = [asyncio.create_task(engine.generate(prompt, params)) for _ in range(3)]
        await asyncio.sleep(0.01)  # they are in flight
        await engine.abort()
        for answer in await asyncio.gather(*tasks):
            check_completion(f"{where}: abort", answer, params)
    with answering(f"{where}: pause and resume", "that requests in flight are answered afterwards"):
        task = asyncio.create_task(
            engine.generate(prompt, replace(params, max_new_tokens=8, min_new_tokens=8))
        )
        await asyncio.sleep(0)
        await engine.pause()
        await engine.resume()
        answer = await task
    check_completion(f"{where}: resume", answer, params=replace(params, max_new_tokens=8))
    kept = answer.finish_reason != "abort"
    require(kept, f"{where}: pause and resume", found="abort", wanted="that requests in flight are kept")


async def _weights(where: str, engine: RolloutEngine, prompt: list[int], send: Send | None) -> None:
    if send is not None:
        await _update(where, engine, prompt, send, version="1")
    with answering(f"{where}: offload and onload", "memory given up and taken back"):
        await engine.offload()
        await engine.onload()
    if send is not None:
        await _update(where, engine, prompt, send, version="2")


async def _update(where: str, engine: RolloutEngine, prompt: list[int], send: Send, *, version: str) -> None:
    where, transport = f"{where}: update to version {version}", engine.capabilities.transports[0]
    with answering(where, "one that is taken"):
        plan = await engine.open_update(transport, version)
        named = (plan.transport, plan.version)
        require(named == (transport, version), where, found=f"a plan of {named}", wanted="what was asked for")
        sent, received = await asyncio.gather(send(plan), engine.receive(plan))
        params = SamplingParams(max_new_tokens=2, seed=1)
        answer = await engine.generate(prompt, params)
    require(sent == received, where, found="fingerprints that are not those sent", wanted="the same")
    check_completion(where, answer, params)
    found = f"weight_version {answer.weight_version!r}"
    require(answer.weight_version == version, where, found=found, wanted=repr(version))
