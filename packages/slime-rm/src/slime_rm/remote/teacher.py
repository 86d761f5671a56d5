"""The sample hook `teacher`: log-probs of a served teacher, for on-policy distillation."""

from __future__ import annotations

import math
from typing import Any

from slime_core.config.base import Seconds
from slime_core.config.derive import run_folder
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem, RewardError, SampleError
from slime_core.samples import Sample

from slime_rm.remote.json_client import ClientSettings, JsonClient


class TeacherSettings(ClientSettings):
    """Options of the sample hook `teacher`."""

    opd_teacher_url: str | None = None
    """Address of the teacher's SGLang server, without a path; `served:NAME` is a model that the run serves."""
    request_timeout_s: Seconds = 60.0
    """Deadline of one try, seconds."""


class ServedTeacher:
    """Gives each training sample the log-probs of its response tokens under a teacher that an SGLang server holds.

    Token ids are sent, so the teacher has the policy's vocabulary; its answer is held against them id by id. The server
    generates nothing. Rewards are left alone: a run has the reward of its task and the teacher. Choose it with
    `--rollout-sample-hook-path teacher`, beside `--use-opd`.

    Args:
        settings: the server, and how it is asked.

    Raises:
        ConfigError: no server is given.

    Source: SGLang 0.5 `GenerateReqInput` (`return_logprob`, `logprob_start_len`), whose input log-probs are those of the
    logits as they are, at temperature 1; slime/rollout/on_policy_distillation.py, from which we differ: the answer goes to
    `teacher_log_probs` at once and not by way of the reward, and requests are tried again.
    """

    def __init__(self, *, settings: TeacherSettings) -> None:
        if not settings.opd_teacher_url:
            wanted = "the address of the teacher's SGLang server"
            raise ConfigError([Problem("rm.opd_teacher_url", "nothing", wanted, "give --opd-teacher-url")])
        self._settings = settings
        self._url = f"{settings.opd_teacher_url.rstrip('/').removesuffix('/generate')}/generate"
        self._client: JsonClient | None = None

    async def __call__(
        self, args: Settings, sample: Sample, *, rollout_id: int | None, evaluation: bool
    ) -> Sample:
        """Set `teacher_log_probs`, float [response_length], nats; a sample of an evaluation stays as it is.

        Raises:
            ConfigError: training samples are not drawn at temperature 1, for which a server has no log-probs.
            SampleError: the sample has images.
            RewardError: the server is down or refuses, or answers with anything but these tokens' log-probs.
        """
        if evaluation:
            return sample
        if args.rollout.rollout_temperature != 1:
            found = f"{args.rollout.rollout_temperature:g} and the sample hook teacher"
            remedy = "drop --rollout-temperature, or give the teacher to the trainer (--opd-teacher-load)"
            raise ConfigError([Problem("rollout.rollout_temperature", found, "1", remedy)])
        if sample.multimodal_inputs:
            raise SampleError(f"{sample.name}: has images; the sample hook teacher takes text alone")
        if self._client is None:
            settings = self._settings.model_copy(update={"run_dir": str(run_folder(args))})
            self._client = JsonClient(self._url, settings)
        sample.teacher_log_probs = (
            [] if sample.response_length == 0 else await self._ask(self._client, sample)
        )
        return sample

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def _ask(self, client: JsonClient, sample: Sample) -> list[float]:
        tokens, n = list(sample.tokens), sample.response_length
        answer = await client.post(
            {
                "input_ids": tokens,
                "sampling_params": {"temperature": 0, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": max(0, len(tokens) - n - 1),
            }
        )
        try:
            entries: list[Any] = answer["meta_info"]["input_token_logprobs"][-n:]
            log_probs, ids = [float(entry[0]) for entry in entries], [entry[1] for entry in entries]
        except (KeyError, IndexError, TypeError, ValueError):
            raise RewardError(
                f"{self._url}: answered {str(answer)[:200]!r} to {sample.name}; wanted meta_info.input_token_logprobs, a "
                f"(log-prob, id, ...) for each of {n} response tokens"
            ) from None
        if ids != tokens[-n:] or not all(map(math.isfinite, log_probs)):
            raise RewardError(
                f"{self._url}: answered {sample.name} with log-probs of other tokens, or none of some; the teacher must have "
                "the policy's vocabulary"
            )
        return log_probs
