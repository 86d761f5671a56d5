"""`Bm25Index`: passages of a file, found by their words; `RemoteIndex`: passages of a server; and `Indices`: those of a run."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slime_core.errors import DataError, PluginError, RewardError
from slime_core.runtime.daemon_thread import DaemonThread
from slime_rm.remote.json_client import ClientSettings, JsonClient

from slime_agents.search.passages import Passage, read_passages


class Index(Protocol):
    """Finds passages."""

    async def find(self, query: str, n: int) -> list[Passage]:
        """Return at most `n` passages, the best first."""


class Bm25Index:
    """The passages of a JSON-lines file, rated by BM25 over lower-case words without English stop words.

    Only passages that have a word of the query are found. Ties go by the order of the file.

    Raises:
        DataError: the file cannot be read, has no passage, or none with a word.
        PluginError: bm25s is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._passages = list(read_passages(path))
        if not self._passages:
            raise DataError(f"{path}: holds no passage; wanted at least one")
        try:
            self._bm25s: Any = importlib.import_module("bm25s")
        except ImportError as error:
            raise PluginError(
                "the environment search needs bm25s for a local index; install slime-agents[search]"
            ) from error
        words = self._words([f"{passage.title} {passage.text}" for passage in self._passages])
        if not any(words):
            raise DataError(f"{path}: none of its {len(self._passages)} passages has a word to find it by")
        self._vocabulary = {word for each in words for word in each}
        self._bm25 = self._bm25s.BM25()
        self._bm25.index(words, show_progress=False)

    def search(self, query: str, n: int) -> list[Passage]:
        """Return at most `n` passages, the best first; takes the time of a scan over those that share a word."""
        known = [word for word in self._words([query])[0] if word in self._vocabulary]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        best = (-scores).argsort(kind="stable")[:n]
        return [self._passages[i] for i in best if scores[i] > 0]

    async def find(self, query: str, n: int) -> list[Passage]:
        """Return at most `n` passages, the best first; searches on a thread, as it may take long."""
        return await asyncio.to_thread(self.search, query, n)

    def _words(self, texts: list[str]) -> list[list[str]]:
        words: list[list[str]] = self._bm25s.tokenize(
            texts, stopwords="en", return_ids=False, show_progress=False
        )
        return words


class Indices:
    """The indices of a run, which its conversations share: that of a file is built once, however many ask for it at once, and a
    server gets no more requests at once than its settings say."""

    def __init__(self) -> None:
        self._building: dict[Path, asyncio.Future[Bm25Index]] = {}
        self._remote: dict[tuple[str, ClientSettings], RemoteIndex] = {}

    async def of(self, path: Path) -> Bm25Index:
        """Return the index of a file; the first call begins to build it, on a thread of its own.

        Raises:
            DataError: the file is no corpus; see `Bm25Index`.
            PluginError: bm25s is not installed.
        """
        if path not in self._building:
            thread = DaemonThread("index")
            self._building[path] = asyncio.wrap_future(thread.submit(Bm25Index, path))
            thread.shutdown(wait=False)
        building = self._building[path]
        try:
            # Shielded: one conversation that gives up must not end what the others wait for.
            return await asyncio.shield(building)
        except asyncio.CancelledError as error:
            if not building.done():
                error.add_note(
                    f"the index of {path} was still being built; raise --environment-timeout-s, as the first "
                    "conversations wait for all of it, or ask a server (url)"
                )
            raise

    def at(self, url: str, settings: ClientSettings) -> RemoteIndex:
        """Return the index of a server; raises as `RemoteIndex` does."""
        if (url, settings) not in self._remote:
            self._remote[url, settings] = RemoteIndex(url, settings)
        return self._remote[url, settings]

    async def close(self) -> None:
        """Wait for no index any more, and close the connections to servers."""
        for building in self._building.values():
            building.cancel()
        for remote in self._remote.values():
            await remote.close()


class RemoteIndex:
    """Passages of a server that speaks the protocol of Search-R1's.

    It is posted `{"queries": [text], "topk": n, "return_scores": true}`, and answers `{"result": [[{"document": row, "score":
    number}, ...]]}`, or rows without scores; see `Passage.of` for a row.

    Args:
        url: where to post.
        settings: how it is asked.

    Raises:
        ConfigError: `url` is no address.
        PluginError: httpx is not installed, or the key cannot be read.
    """

    def __init__(self, url: str, settings: ClientSettings) -> None:
        self._url, self._client = url, JsonClient(url, settings)

    async def find(self, query: str, n: int) -> list[Passage]:
        """Return at most `n` passages, the best first.

        Raises:
            RewardError: the server does not answer, or with something else.
        """
        reply = await self._client.post({"queries": [query], "topk": n, "return_scores": True})
        try:
            (found,) = reply["result"]
            rows = [each.get("document", each) for each in found]
            return [Passage.of(_as_row(row), f"{self._url}: result {i}") for i, row in enumerate(rows[:n])]
        except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
            raise RewardError(
                f'{self._url}: answered {str(reply)[:200]!r} ({error}); wanted {{"result": [[{{"document": '
                '{"contents": text}}]]}'
            ) from error

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


def _as_row(row: Any) -> Mapping[str, Any]:
    return {"text": row} if isinstance(row, str) else row
