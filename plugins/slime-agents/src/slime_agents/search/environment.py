"""The environment `search`: answers `<search>query</search>` with passages, and ends at `<answer>...</answer>`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from slime_core.errors import ConfigError, Problem
from slime_core.protocols import Environment, Observation
from slime_core.samples import Sample, Status
from slime_rm.remote.json_client import ClientSettings, check_address
from slime_rm.text.f1 import normal_words
from slime_rm.text.labels import label_of

from slime_agents.search.index import Index, Indices

#: Name of the indices among a run's services.
SERVICE = "slime-agents/search"
SEARCH, ANSWER = ("<search>", "</search>"), ("<answer>", "</answer>")


class Search(Environment):
    """Looks up what a turn asks for, in a file or at a server, and puts the passages between `<information>` and `</information>`.

    The closing tags are to be stop strings (`--rollout-stop "</search>" "</answer>"`), or the policy invents the passages. A turn
    that ends in neither is told so, and may try again. The reward is 1.0 for an answer that is the label, else 0.0: by its
    words, without case, punctuation and articles. The label may be a JSON list of answers, any of which is right.

    Source: Search-R1 (arXiv:2503.09516).

    Args:
        corpus: JSON-lines file of passages, each with `text` and perhaps `title`, or with `contents`.
        url: server in the place of it; see `RemoteIndex`.
        topk: passages for a query.
        passage_chars: most characters of one.
        scores: `answer` gives the reward; `none` leaves it to another one.
        request: how a server is asked: the fields of `ClientSettings`.
    """

    def __init__(
        self,
        *,
        corpus: str | None = None,
        url: str | None = None,
        topk: int = 3,
        passage_chars: int = 1000,
        scores: Literal["answer", "none"] = "answer",
        request: dict[str, object] | None = None,
    ) -> None:
        if (corpus is None) == (url is None):
            found = "neither" if corpus is None else "both"
            raise ConfigError([Problem("environment_args", found, "corpus, or url, and not both")])
        if topk < 1 or passage_chars < 1:
            numbers = f"topk {topk}, passage_chars {passage_chars}"
            raise ConfigError([Problem("environment_args", numbers, "at least 1 each")])
        self._corpus, self._url = corpus, url
        self._request = ClientSettings.model_validate(request or {})
        if url is not None:
            check_address(url, self._request.run_dir)
        self._indices = Indices()
        self._topk, self._chars, self._scores = topk, passage_chars, scores

    def use(self, services: dict[str, Any]) -> None:
        """Share the indices of the run."""
        self._indices = services.setdefault(SERVICE, self._indices)

    async def reset(self, sample: Sample) -> None:
        """Say nothing, as the prompt explains the tags; the first ones of a run wait until the index is built."""
        if self._scores == "answer":
            label_of(sample)
        await self._opened()

    async def step(self, sample: Sample, text: str) -> Observation:
        """Look up the query that ends the turn, or end the conversation at an answer."""
        reward = 0.0 if self._scores == "answer" else None
        if sample.status is Status.TRUNCATED:
            return Observation(done=True, reward=reward)
        if (answer := _ends_in(text, ANSWER)) is not None:
            if reward is not None:
                reward = float(_is_right(answer, label_of(sample)))
            return Observation(done=True, reward=reward, info={"answer": answer})
        query = _ends_in(text, SEARCH)
        if not query:
            return Observation(content=_UNCLEAR, reward=reward, info={"unclear": True})
        index = await self._opened()
        passages = await index.find(query, self._topk)
        shown = [passage.shown(i, self._chars) for i, passage in enumerate(passages, start=1)]
        said = "\n\n<information>" + ("\n".join(shown) or "Nothing was found.") + "</information>\n\n"
        return Observation(content=said, reward=reward, info={"query": query, "found": len(shown)})

    def state(self) -> dict[str, int]:
        """Return nothing to remember: every turn is answered by itself."""
        return {}

    async def _opened(self) -> Index:
        """Return the index of the run."""
        if self._url is not None:
            return self._indices.at(self._url, self._request)
        assert self._corpus is not None
        return await self._indices.of(Path(self._corpus))


_UNCLEAR = (
    "\n\nThat was neither a search nor an answer. A search is written <search>what to look for</search>, the final answer "
    "<answer>like this</answer>.\n\n"
)


def _ends_in(text: str, tags: tuple[str, str]) -> str | None:
    """Return what stands between a pair of tags at the end of a turn, None where there is none."""
    opening, closing = tags
    body = text.rstrip()
    if not body.endswith(closing) or opening not in body:
        return None
    return body.removesuffix(closing).rpartition(opening)[2].strip()


def _is_right(answer: str, label: str) -> bool:
    """Return whether an answer has the words of the label, or of one of its list."""
    try:
        listed = json.loads(label)
    except ValueError:
        listed = label
    wanted = listed if isinstance(listed, list) else [label]
    return any(normal_words(answer) == normal_words(str(each)) for each in wanted)
