"""`Scorer`: sends each sample to its reward, and combines several weighted rewards into one score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from slime_core.errors import PluginError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.samples import Group, Sample

Result = Reward | RewardFailure


class Scorer:
    """Scores samples, each with its own reward or else with the run's.

    A sample chooses by its `custom_rm_path`, then, unless `forced`, by the name in its `metadata["rm_type"]`. The
    pool of a reward that only samples choose is started by the first of them.

    Args:
        weights: the run's rewards, by name, and the weight of each in the score. One with weight 1 is that
            reward itself; several give a dict with their weighted sum as `score` beside each one's score. Without any,
            rewards come from the generator, or from those that samples choose.
        pool_of: builds the pool of a reward; raises PluginError for a name that is not installed.
        forced: whether the run's reward takes the place of `metadata["rm_type"]`, as `--custom-rm-path` does.
    """

    def __init__(
        self, weights: Mapping[str, float], *, pool_of: Callable[[str], RewardPool], forced: bool = False
    ) -> None:
        self._weights = dict(weights)
        self._forced = forced
        self._pool_of = pool_of
        self._pools = {reference: pool_of(reference) for reference in weights}
        self._started: dict[str, asyncio.Task[None]] = {}
        self._ready: dict[str, RewardPool] = {}
        """Those of them that have started."""

    async def start(self) -> None:
        """Start the pools of the run's own rewards.

        Raises:
            PluginError: a reward does not import, or does not take its options.
        """
        try:
            await asyncio.gather(*(self._start(reference) for reference in self._weights))
        except BaseException:
            await self.close()
            raise

    def asks(self, sample: Sample) -> bool:
        """Return whether a reward is asked about a sample: the run's, or where it has none the sample's own.

        Where the run has none, a name in `metadata["rm_type"]` counts only if the generator gave no reward.
        """
        if self._weights or sample.custom_rm_path is not None:
            return True
        return sample.reward is None and sample.metadata.get("rm_type") is not None

    async def score(self, sample: Sample) -> Result:
        """Score one sample, about which a reward is asked (`asks`)."""
        try:
            weights = self._weights_of(self._own(sample))
            pools = [self._ready.get(reference) or await self._start(reference) for reference in weights]
        except PluginError as error:
            return _unscored(sample, error)
        if len(pools) == 1 and 1.0 in weights.values():
            return await pools[0].score(sample)
        return _weighted(sample, weights, await asyncio.gather(*(pool.score(sample) for pool in pools)))

    async def score_group(self, group: Group) -> list[Result]:
        """Score a whole group with one call of a group reward; one result a sample, in order."""
        try:
            weights = self._weights_of(self._own_of_all(group))
            pools = [self._ready.get(reference) or await self._start(reference) for reference in weights]
        except PluginError as error:
            return [_unscored(sample, error) for sample in group]
        if len(pools) == 1 and 1.0 in weights.values():
            return list(await pools[0].score_group(group))
        results = await asyncio.gather(*(pool.score_group(group) for pool in pools))
        return [
            _weighted(sample, weights, parts)
            for sample, parts in zip(group, zip(*results, strict=True), strict=True)
        ]

    async def close(self) -> None:
        """Close every pool; may be called twice."""
        for starting in self._started.values():
            starting.cancel()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    def _weights_of(self, own: str | None) -> Mapping[str, float]:
        """Return the rewards of a sample that chooses `own`, and their weights."""
        return self._weights if own is None else {own: 1.0}

    def _own_of_all(self, group: Sequence[Sample]) -> str | None:
        own = {self._own(sample) for sample in group}
        if len(own) > 1:
            raise PluginError(
                f"its group chooses several rewards, {sorted(map(str, own))}; a group is scored by one"
            )
        return own.pop() if own else None

    def _own(self, sample: Sample) -> str | None:
        if sample.custom_rm_path is not None:
            return sample.custom_rm_path
        own = None if self._forced else sample.metadata.get("rm_type")
        if own is not None and not isinstance(own, str):
            raise PluginError(f"metadata['rm_type'] is {own!r}; wanted the name of a reward")
        return own

    async def _start(self, reference: str) -> RewardPool:
        if reference not in self._pools:
            self._pools[reference] = self._pool_of(reference)
        if reference not in self._started:
            self._started[reference] = asyncio.create_task(self._pools[reference].start())
        # Shielded: one caller that gives up must not stop the start that others wait for.
        await asyncio.shield(self._started[reference])
        self._ready[reference] = self._pools[reference]
        return self._pools[reference]


def _unscored(sample: Sample, error: PluginError) -> RewardFailure:
    return RewardFailure(kind="invalid", message=f"{sample.name}: {error}")


def _weighted(sample: Sample, weights: Mapping[str, float], results: Sequence[Result]) -> Result:
    """Return the weighted sum of what several rewards gave one sample; the first failure when one failed.

    Weights and scores are taken as the decimals that they are written as, and their sum is rounded once: with weights 0.7, 0.2
    and 0.1 a sample that is right by all has 1, in whatever order they are.
    """
    value: dict[str, Any] = {"score": 0.0}
    details: dict[str, Any] = {}
    total, seconds = Fraction(0), 0.0
    for (reference, weight), result in zip(weights.items(), results, strict=True):
        if isinstance(result, RewardFailure):
            return result
        if result.score is None:
            return RewardFailure(
                kind="invalid",
                message=f"{sample.name}: reward {reference} returned a dict without 'score', which cannot be weighted",
            )
        total += Fraction(str(weight)) * Fraction(str(result.score))
        seconds += result.seconds
        value[reference] = result.score
        details[reference] = result.value
    try:
        value["score"] = float(total)
    except OverflowError:
        message = f"{sample.name}: the weighted sum of its rewards is too large for a float"
        return RewardFailure(kind="invalid", message=message)
    value["details"] = details
    return Reward(score=value["score"], value=value, seconds=seconds)
