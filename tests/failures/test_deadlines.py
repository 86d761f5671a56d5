"""A part of a run that hangs ends the run, by name."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.config.factories import TrainerFactory
from slime_core.config.load import load_settings
from slime_core.errors import DeadlineError
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble
from slime_core.testing import tabular


class GreedyHangs(tabular.TabularEngine):
    """Never answers an evaluation."""

    async def generate(self, tokens, params, *, session_id=None):
        if params.temperature == 0:
            await asyncio.Event().wait()
        return await super().generate(tokens, params, session_id=session_id)


def create_engine(build):
    return GreedyHangs()


class SaveHangs(tabular.TabularTrainer):
    """Never ends a save."""

    async def save(self, path, in_background=False):
        if not in_background:
            await asyncio.Event().wait()

    async def written(self, wait):
        if wait:
            await asyncio.Event().wait()
        return False


def create_trainer(build):
    inner = tabular.create_trainer(build)
    inner.__class__ = SaveHangs
    return inner


create_trainer = TrainerFactory(create_trainer, tabular.TabularTrainer.capabilities)


@pytest.mark.parametrize(
    ("part", "factory", "deadline", "message"),
    [
        (["--rollout-engine"], "create_engine", "rollout", "evaluation after step 0"),
        (["--train-backend"], "create_trainer", "train", "the checkpoint after step 4"),
        (["--async-save", "--train-backend"], "create_trainer", "train", "the checkpoint after step 8"),
    ],
)
def test_evaluating_and_saving_have_a_deadline(letters, part, factory, deadline, message):
    registry = Registry()
    flags = [*part, f"{__name__}:{factory}", f"--{deadline}-timeout-s", "3"]
    settings = load_settings([str(letters)], flags, registry=registry)

    async def main() -> None:
        async with asyncio.timeout(100):
            await drive(await assemble(settings, registry))

    with pytest.raises(DeadlineError, match=f"{message} .*: not done after 3 s"):
        asyncio.run(main())
