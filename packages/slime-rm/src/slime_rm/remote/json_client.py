"""`JsonClient`: JSON to a server and back, with retries where another try can help."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime_core.config.base import Amount, Count, Seconds, SectionModel
from slime_core.errors import ConfigError, PluginError, Problem, RewardError
from slime_core.rundir.served_models import key_of, resolve_url

if TYPE_CHECKING:
    import httpx

#: Statuses after which the same request may succeed.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 30.0
_SHOWN_CHARACTERS = 200


class RefusedError(RewardError):
    """The server understood the request and will not answer it."""


class ClientSettings(SectionModel):
    """How a server is asked; the settings of each reward that asks one begin with these."""

    connections: Count = 64
    """Most requests at once; further ones wait."""
    request_timeout_s: Seconds = 20.0
    """Deadline of one try, seconds."""
    tries: Count = 5
    """How often a request is sent before it fails; only failures that another try may mend are tried again."""
    first_wait_s: Amount = 0.5
    """Wait before the second try, seconds; each further one is twice as long, up to 30 s, and shortened by chance by up to a half."""
    api_key_file: str | None = None
    """File with the key that the server wants; that of a model of the run is known."""
    run_dir: str | None = None
    """Folder of the run, by which `served:NAME` is found."""


class JsonClient:
    """Posts JSON to a server over a pool of connections. Belongs to one event loop.

    Args:
        url: where to post; `served:NAME/path` is any of the servers of a model that the run serves.
        settings: how it is asked.

    Raises:
        ConfigError: `url` is no address, or of a model that the run does not serve.
        PluginError: httpx, which only rewards that ask servers need, is not installed; or the key cannot be read.
    """

    def __init__(self, url: str, settings: ClientSettings) -> None:
        check_address(url, settings.run_dir)
        try:
            self._httpx: Any = importlib.import_module("httpx")
        except ImportError as error:
            raise PluginError("rewards that ask a server need httpx; install slime-rm[remote]") from error
        self._url, self._settings = url, settings
        self._turn = itertools.count()
        self._has_answered, self._was_missed = False, False
        self._slots = asyncio.Semaphore(settings.connections)
        key = settings.api_key_file
        self._client = self._httpx.AsyncClient(
            timeout=settings.request_timeout_s,
            headers={} if key is None else {"Authorization": f"Bearer {_key(key)}"},
            limits=self._httpx.Limits(max_connections=settings.connections),
            trust_env=False,  # a proxy of the environment is for the internet, not for a server of the run
        )

    async def post(self, body: Any) -> Any:
        """Post `body` and return the reply, both as JSON values. Where nobody took the connection in all tries of a request, and
        nothing was ever answered, each further request is tried once.

        Raises:
            RefusedError: the server refuses, and says so by a status that another try would not change.
            RewardError: no reply after all tries, or one that is not JSON; says what came.
        """
        tries = 1 if self._was_missed and not self._has_answered else self._settings.tries
        for attempt in range(1, tries + 1):
            try:
                async with self._slots, asyncio.timeout(self._settings.request_timeout_s):
                    reply = await self._client.post(self._address(), json=body, headers=self._headers())
            except (self._httpx.TransportError, TimeoutError, ConnectionError) as error:
                what = f"{type(error).__name__} {error}".strip()
                is_missed = isinstance(error, self._httpx.ConnectError)
            else:
                self._has_answered, is_missed = True, False
                if reply.status_code not in TRANSIENT:
                    return self._read(reply)
                what = f"status {reply.status_code}, {_shown(reply.text)}"
            if attempt < tries:
                await asyncio.sleep(self._wait_s(attempt))
        self._was_missed = is_missed
        raise RewardError(f"{self._url}: no answer after {tries} tries (the last: {what}); is the server up?")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _address(self) -> str:
        """Return where the next request goes: to the servers in turn, as they are now.

        Raises:
            ConnectionError: there is none at the moment.
        """
        addresses = resolve_url(self._url, self._settings.run_dir)
        if not addresses:
            raise ConnectionError("none of its servers is up")
        return addresses[next(self._turn) % len(addresses)]

    def _headers(self) -> dict[str, str]:
        """Return what shows the key of a model of the run, as it is now."""
        key = key_of(self._url, self._settings.run_dir)
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _wait_s(self, attempt: int) -> float:
        longest = min(self._settings.first_wait_s * 2.0 ** (attempt - 1), _LONGEST_WAIT_S)
        return longest * random.uniform(0.5, 1.0)  # so that many clients do not come back at once

    def _read(self, reply: httpx.Response) -> Any:
        if not reply.is_success:
            raise RefusedError(f"{self._url}: refused with status {reply.status_code}, {_shown(reply.text)}")
        try:
            return reply.json()
        except ValueError as error:
            raise RewardError(f"{self._url}: answered {_shown(reply.text)}; wanted JSON") from error


def check_address(url: str, run_dir: str | None) -> None:
    """Refuse what is no address of a server.

    Raises:
        ConfigError: it is none, or of a model that the run in the folder `run_dir` does not serve.
    """
    wanted = "http://HOST:PORT, or served:NAME"
    urls = resolve_url(url, run_dir)
    wrong = [url for url in urls if re.match(r"https?://[^/]", url) is None or not _has_port(url)]
    if wrong:
        raise ConfigError(Problem("the address of a reward's server", repr(url), wanted) for url in wrong)


def _has_port(url: str) -> bool:
    """Return whether host and port of an address can be ones, or it has no port."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _key(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise PluginError(f"api_key_file: {file}: cannot be read ({error.strerror})") from error


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS]) + ("..." if len(text) > _SHOWN_CHARACTERS else "")
