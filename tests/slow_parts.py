"""An engine and a trainer that stop to be interrupted: where `HALT` says, they make the file `HALTED`, and take their time."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

from slime_core.testing import tabular


def halts(where: str) -> bool:
    """Say whether this is the place, and tell the test, once a process."""
    if os.environ.get("HALT") != where:
        return False
    del os.environ["HALT"]
    Path(os.environ["HALTED"]).touch()
    return True


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
        if halts(f"train {batch.step}"):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 15_000_000)  # some seconds, and no signal cuts it short
        return await super().train(batch)


def create_engine(build):
    return Engine()


def create_trainer(build):
    trainer = tabular.create_trainer(build)
    trainer.__class__ = Trainer
    return trainer


create_trainer.saves_in_background = True  # type: ignore[attr-defined]  # as the check asks
