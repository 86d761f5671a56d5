"""Parts of a run that stop to be attacked: where `HALT` says, they make the file `HALTED`, and take their time."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

from slime_core.config.factories import TrainerFactory
from slime_core.plugins.hooks import hookimpl
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.testing import tabular


def halts(where: str) -> bool:
    """Say whether this is the place, and tell the test, once a process."""
    if os.environ.get("HALT") != where:
        return False
    del os.environ["HALT"]
    Path(os.environ["HALTED"]).touch()
    return True


def take_time(where: str) -> None:
    """Compute for some seconds at a place (`HALT_ROUNDS` says how many), in native code, so that no signal cuts it short."""
    if halts(where):
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(os.environ.get("HALT_ROUNDS", "15_000_000")))


class Engine(tabular.TabularEngine):
    """Waits for a second signal at the first training sample, or the first evaluation, under the weights of a step."""

    async def generate(self, tokens, params, *, session_id=None):
        kind = "eval" if params.temperature == 0 else "rollout"
        if halts(f"{kind} {self.version}"):
            await asyncio.sleep(1e6)
        return await super().generate(tokens, params, session_id=session_id)


class Trainer(tabular.TabularTrainer):
    """Blocks the event loop's thread in native code while it trains a step."""

    async def train(self, batch):
        take_time(f"train {batch.step}")
        return await super().train(batch)


async def generate(ctx, sample, params):
    """A generator of any engine: at the first sample of a step's rollout it asks for one response after the other, for ever.

    Steps are counted by groups, of which one has four, so that nothing has to know of it.
    """
    if not ctx.evaluation and halts(f"rollout {sample.group_index // 4 + 1}"):
        while True:
            await ctx.engine.generate(sample.tokens, params)
    return await single_turn(ctx, sample, params)


def before_train_step(step: int, optimizer_step: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """A hook of Megatron's trainer that takes some seconds in native code."""
    take_time(f"train {step}")


class Tracker:
    """Takes some seconds to log a step, between its evaluation and its checkpoint."""

    @hookimpl
    def slime_step_end(self, step: int) -> None:
        """Wait for the signal."""
        take_time(f"log {step}")


def create_tracker(build):
    return Tracker()


def create_engine(build):
    return Engine()


def create_trainer(build):
    trainer = tabular.create_trainer(build)
    trainer.__class__ = Trainer
    return trainer


create_trainer = TrainerFactory(create_trainer, tabular.TabularTrainer.capabilities)
