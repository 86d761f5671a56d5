"""The functions of `slime.rollout.rm_hub`: the rewards of slime-rm on a response, a label and metadata."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core import samples
from slime_core.errors import PluginError, RewardError
from slime_core.plugins.registry import Registry
from slime_core.rewards.results import Grade, plain_value

from slime_compat.views.running.http import post
from slime_compat.views.running.runtime import running
from slime_compat.views.samples.sample import ReferenceSample as Sample


def graded(name: str, response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> Any:
    """Return what the reward `name` gives: a number, or a dict of several."""
    sample = samples.Sample(
        index=0,
        group_index=0,
        response=response,
        label=None if label is None else str(label),
        metadata=dict(metadata or {}),
    )
    return _plain(_reward(name)(sample))


def score(name: str, response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return the score that the reward `name` gives."""
    value = graded(name, response, label, metadata)
    return float(value["score"] if isinstance(value, Mapping) else value)


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Score a sample: by its `custom_rm_path`, the run's `--custom-rm-path`, its metadata's `rm_type`, or the run's.

    In a rollout function by the run's own workers, with their deadlines.

    Raises:
        PluginError: nothing says how.
        RewardError: the reward failed; names the sample.
    """
    runtime = running()
    if runtime is not None and runtime.run is not None and runtime.run.scorer is not None:
        before, sample.reward = (
            sample.reward,
            None,
        )  # what else a reward writes stays, and what the sample has besides is there
        try:
            await runtime.run.score([sample], evaluation=runtime.context.evaluation)
            return sample.reward
        finally:
            sample.reward = before
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    if path is not None:
        return await _awaited(_imported(path)(args, sample, **kwargs))
    name = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    if not name:
        raise PluginError(
            f"{sample.name}: nothing says how it is scored; wanted --rm-type, --custom-rm-path or metadata rm_type"
        )
    return _plain(await _awaited(_reward(str(name).strip())(sample)))


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10, **_: Any) -> Any:
    """Post prompt, response and label to `--rm-url`; returns the JSON that comes back."""
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(args.rm_url, payload, max_retries=max_retries)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """Score samples: with one call of the run's `--custom-rm-path`, or each by itself."""
    path = getattr(args, "custom_rm_path", None)
    if path is not None and not any(sample.custom_rm_path for sample in samples):
        return list(await _awaited(_imported(path)(args, samples, **kwargs)))
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


def _reward(name: str) -> Any:
    reward = Registry().resolve("slime.rewards", name)
    return reward() if inspect.isclass(reward) else reward


def _imported(path: str) -> Callable[..., Any]:
    registry = Registry()
    return registry.imported(registry.find("slime.rewards", path))  # type: ignore[no-any-return]  # called as there


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Grade):
        plain = plain_value(value)
        if not isinstance(plain, float | dict):
            raise RewardError(plain.what)
        return plain
    return value
