"""The reward `remote_rm`: a server's."""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError, Problem, RewardError
from slime_core.sample import Sample

from slime_rm.batches import Batches
from slime_rm.posting import JsonClient


class RemoteReward:
    """Posts `{"prompt", "response", "label"}` to a server; the JSON that it answers is the reward.

    The answer is a number, or an object with several of which `--reward-key` chooses. With `batch_size` above 1 the
    body is a list of such objects, and the answer a list of rewards in the same order.

    All tries together must end within `--reward-timeout-s`, or that is what the failure says.

    Args:
        rm_url: where to post.
        batch_size: most samples of a request.
        batch_wait_s: longest that a sample waits for others to fill its batch, seconds.
        send_metadata: add the sample's `metadata`.
        connections: most requests at once.
        request_timeout_s: deadline of one try, seconds.
        tries: how often a request is sent before it fails.
        run_dir: folder of the run.

    Source: slime/rollout/rm_hub (`remote_rm`), from which we differ in batching, and in not trying again what the
    server refuses.
    """

    def __init__(
        self,
        *,
        rm_url: str | None,
        batch_size: int = 1,
        batch_wait_s: float = 0.05,
        send_metadata: bool = False,
        connections: int = 64,
        request_timeout_s: float = 20.0,
        tries: int = 5,
        first_wait_s: float = 0.5,
        run_dir: str | None = None,
    ) -> None:
        if not rm_url:
            raise ConfigError(
                [Problem("rm.rm_url", "nothing", "the address of the reward's server", "give --rm-url")]
            )
        self._client = JsonClient(
            rm_url,
            connections=connections,
            request_timeout_s=request_timeout_s,
            tries=tries,
            first_wait_s=first_wait_s,
            run_dir=run_dir,
        )
        self._url = rm_url
        self._batch_size = batch_size
        self._batches = Batches(self._post, size=batch_size, wait_s=batch_wait_s)
        self._send_metadata = send_metadata

    async def __call__(self, sample: Sample) -> float | dict[str, Any]:
        """Return the server's reward for a sample.

        Raises:
            RewardError: the server is down, refuses, or answers with anything but a reward.
        """
        body: dict[str, Any] = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        if self._send_metadata:
            body["metadata"] = sample.metadata
        answer = await (self._client.post(body) if self._batch_size == 1 else self._batches.answer(body))
        if isinstance(answer, bool | int | float | dict):
            return answer
        raise RewardError(f"{self._url}: answered {str(answer)[:200]!r}; wanted a number or an object")

    async def aclose(self) -> None:
        """Close the connections."""
        self._batches.close()
        await self._client.aclose()

    async def _post(self, bodies: list[Any]) -> list[Any]:
        answers = await self._client.post(bodies)
        if not isinstance(answers, list) or len(answers) != len(bodies):
            found = f"{len(answers)} rewards" if isinstance(answers, list) else repr(str(answers)[:200])
            raise RewardError(
                f"{self._url}: answered {found} to {len(bodies)} samples; wanted a list of one each"
            )
        return answers
