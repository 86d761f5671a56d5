"""What a start waits for has a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from slime_core.errors import DeadlineError
from slime_core.run.start import _load


def test_a_checkpoint_that_does_not_load_ends_the_start_with_its_name():
    async def hang(path):
        await asyncio.Event().wait()

    run = SimpleNamespace(
        settings=SimpleNamespace(train=SimpleNamespace(train_timeout_s=0.05)),
        trainer=SimpleNamespace(load=hang),
    )
    found = SimpleNamespace(path=Path("checkpoints/7"), trainer=Path("checkpoints/7/trainer"))
    with pytest.raises(DeadlineError, match=r"loading the checkpoint checkpoints/7 \(--train-timeout-s\)"):
        asyncio.run(_load(run, found))
