"""`ServiceClient`: judges by asking a service, which may be restarted meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slime_core.errors import RewardError
from slime_rm.remote.json_client import ClientSettings, JsonClient

from slime_kernels.judge.evaluator import Options
from slime_kernels.judge.reward import scale_of
from slime_kernels.judge.verdict import EvalStatus, Verdict, verdict_of
from slime_kernels.problems.problem import KernelProblem
from slime_kernels.section import KernelsSection
from slime_kernels.service.requests import request_of

#: The service queues what it cannot evaluate yet, so that an answer takes as long as those before it.
_QUEUED_S = 3600.0
_TRIES, _CONNECTIONS = 12, 256


class ServiceClient:
    """Asks a service for verdicts. Only what was lost on the way is asked again; the service evaluates it once all the same.

    Args:
        section: where the service is, and how candidates are tried.
    """

    def __init__(self, section: KernelsSection) -> None:
        assert section.service is not None
        self._url, self._trials, self._scale = section.service, section.correct_trials, scale_of(section)
        self._settings = ClientSettings(
            connections=_CONNECTIONS, request_timeout_s=_QUEUED_S, tries=_TRIES, first_wait_s=0.5
        )
        self._clients: dict[int, JsonClient] = {}

    async def judge(
        self, problem: KernelProblem, source: str, *, backend: str = "triton", options: Options | None = None
    ) -> Verdict:
        """Return what the service says of a candidate, with the reward that these settings give for it.

        Raises:
            RewardError: it refuses, or gave no answer in all tries: nothing is known of the candidate.
        """
        options = options or Options(n_trials=self._trials)
        loop = id(asyncio.get_running_loop())
        client = self._clients.get(loop) or self._clients.setdefault(
            loop, JsonClient(self._url, self._settings)
        )
        asked = request_of(
            problem,
            source,
            backend=backend,
            verbose=True,
            num_correct_trials=options.n_trials,
            seed=options.seed,
            measure_performance=options.measure,
        )
        try:
            verdict = verdict_of(await client.post(asked))
        except ValueError as error:
            raise RewardError(f"{self._url}: {error}; is this an evaluation service?") from error
        if verdict.status is EvalStatus.SERVER_ERROR:
            return replace(verdict, message=f"{self._url}: {verdict.message}")
        return replace(verdict, reward=self._scale.reward(verdict))

    async def close(self) -> None:
        """Close the connections of this event loop; another question opens new ones."""
        client = self._clients.pop(id(asyncio.get_running_loop()), None)
        if client is not None:
            await client.close()
