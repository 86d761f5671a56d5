"""Calling a reward, in a pool and without one."""

import asyncio

from slime_core.rewards.workers.calling import build_reward


def asked(reward, options, samples):
    """Build a reward from its options and call it without a pool; returns what it returns and raises."""

    async def main():
        made = build_reward(reward, options)
        try:
            return await asyncio.gather(*map(made, samples), return_exceptions=True)
        finally:
            await made.close()

    return asyncio.run(main())
