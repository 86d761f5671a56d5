"""The reward `remote_rm`: a server's answer to the posted sample."""

from __future__ import annotations

from typing import Any

from slime_core.config.base import Amount, Count
from slime_core.errors import ConfigError, Problem, RewardError
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.samples import Sample

from slime_rm.remote.batches import Batches
from slime_rm.remote.json_client import ClientSettings, JsonClient


class RemoteRewardSettings(ClientSettings):
    """Options of the reward `remote_rm`."""

    rm_url: str | None = None
    """Where samples are posted."""
    batch_size: Count = 1
    """Most samples of a request."""
    batch_wait_s: Amount = 0.05
    """Longest that a sample waits for others to fill its batch, seconds."""
    send_metadata: bool = False
    """Send the sample's `metadata`, too."""


class RemoteReward:
    """Posts `{"prompt", "response", "label"}` to a server; the JSON that it answers is the reward.

    The response goes without the special tokens at its end. The answer is a number, or an object with several of which
    `--reward-key` chooses. With `batch_size` above 1 the body is a list of such objects, and the answer a list of rewards in
    the same order.

    All tries together must end within `--reward-timeout-s`, or that is what the failure says.

    Args:
        settings: the server, and what it is sent.

    Raises:
        ConfigError: no server is given.

    Source: slime/rollout/rm_hub (`remote_rm`), from which we differ in batching, in not trying again what the
    server refuses, and in special tokens at the end of a response.
    """

    def __init__(self, *, settings: RemoteRewardSettings) -> None:
        if not settings.rm_url:
            raise ConfigError(
                [Problem("rm.rm_url", "nothing", "the address of the reward's server", "give --rm-url")]
            )
        self._settings, self._url = settings, settings.rm_url
        self._client = JsonClient(settings.rm_url, settings)
        self.connections = settings.connections * settings.batch_size
        """How many samples may wait for the server at once."""
        self._batches = Batches(self._post, size=settings.batch_size, wait_s=settings.batch_wait_s)

    async def __call__(self, sample: Sample) -> float | dict[str, Any]:
        """Return the server's reward for a sample.

        Raises:
            RewardError: the server is down, refuses, or answers with anything but a reward.
        """
        response = up_to_special_tokens(sample.response)
        body: dict[str, Any] = {"prompt": sample.prompt, "response": response, "label": sample.label}
        if self._settings.send_metadata:
            body["metadata"] = sample.metadata
        answer = await (
            self._client.post(body) if self._settings.batch_size == 1 else self._batches.answer(body)
        )
        if isinstance(answer, bool | int | float | dict):
            return answer
        raise RewardError(f"{self._url}: answered {str(answer)[:200]!r}; wanted a number or an object")

    async def close(self) -> None:
        """Close the connections."""
        self._batches.close()
        await self._client.close()

    async def _post(self, bodies: list[Any]) -> list[Any]:
        answers = await self._client.post(bodies)
        if not isinstance(answers, list) or len(answers) != len(bodies):
            found = f"{len(answers)} rewards" if isinstance(answers, list) else repr(str(answers)[:200])
            raise RewardError(
                f"{self._url}: answered {found} to {len(bodies)} samples; wanted a list of one each"
            )
        return answers
