"""`post` and `get` as generate functions there use them: the run's engine without a socket, everything else by HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from slime_core.errors import EngineError

from slime_compat.engine.requests import answer, next_seed, versions_in
from slime_compat.views.running.loop import awaited
from slime_compat.views.running.runtime import Runtime, running

#: Tries of a request that does not get through, and seconds between them. There it is 60 times, also for what the server refuses.
RETRIES = 60
PAUSE_S = 1.0


async def post(
    url: str,
    payload: Mapping[str, Any],
    max_retries: int = RETRIES,
    headers: Mapping[str, str] | None = None,
    **_: Any,
) -> Any:
    """Post JSON and return the JSON that comes back, or the text where it is none.

    Args:
        url: where to; `/generate` of the run's own engine is answered in this process.
        payload: JSON values.
        max_retries: tries where the server cannot be reached or fails (5xx); what it refuses (4xx) is not tried again.
        headers: of the request.

    Raises:
        EngineError: it was refused, or no try got through; says what came back.
        DataError: the run's engine does not take the request; names the field.
    """
    runtime = running()
    if runtime is not None and url.rstrip("/") == f"{runtime.server.url}/generate":
        own = _own(runtime, payload, (headers or {}).get("X-SMG-Routing-Key"))
        return await awaited(own, runtime.loop)
    return await _request("POST", url, max_retries, json=dict(payload), headers=headers)


async def get(
    url: str, max_retries: int = RETRIES, headers: Mapping[str, str] | None = None, **_: Any
) -> Any:
    """Get JSON, or text where it is none; raises as `post` does."""
    return await _request("GET", url, max_retries, headers=headers)


def init_http_client(args: object) -> None:
    """Do nothing: each request has its connection."""


async def _own(runtime: Runtime, payload: Mapping[str, Any], session_id: str | None) -> dict[str, Any]:
    number = runtime.n_requests
    runtime.n_requests += 1
    told = await answer(
        payload,
        runtime.context.engine,
        runtime.context.tokenizer,
        default_seed=next_seed(runtime.params, number),
        session_id=session_id,
    )
    runtime.own.update(versions_in(told["meta_info"]))
    return told


async def _request(method: str, url: str, tries: int, **request: Any) -> Any:
    failure = "no try was allowed"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for number in range(max(1, tries)):
            if number:
                await asyncio.sleep(PAUSE_S)
            try:
                async with session.request(method, url, **request) as response:
                    body = await response.text()
                    if response.status < 400:
                        return _parsed(body)
                    failure = f"status {response.status}: {body[:200]}"
                    if response.status < 500:
                        break
            except (aiohttp.ClientError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
    raise EngineError(f"{method} {url}: {failure}")


def _parsed(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body
