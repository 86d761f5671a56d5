"""Rewards that misbehave, importable by name, and pools of them."""

import asyncio
from pathlib import Path

import pytest
from slime_core.rewards.pool import RewardPool
from slime_core.samples import Sample


@pytest.fixture(autouse=True)
def importable_rewards(monkeypatch):
    """The rewards of this package's tests, `misbehaving_rewards` and `hostile_rewards`, can be imported by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


def pool_of(name, options=None, **settings):
    return RewardPool(
        f"misbehaving_rewards:{name}", options or {}, **{"workers": 1, "timeout_s": 30, **settings}
    )


def scores(name, responses, *, options=None, metadata=None, **settings):
    """Score one sample a response, one after the other, in one pool."""

    async def main():
        async with pool_of(name, options, **settings) as pool:
            return [
                await pool.score(Sample(index=i, response=response, metadata=metadata or {}))
                for i, response in enumerate(responses)
            ]

    return asyncio.run(main())
