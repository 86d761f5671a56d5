"""The end of a run: whatever fails there, the rest is closed, and the cause stays."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import PluginError, TrainerError
from slime_core.launch.local import drive
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble
from slime_core.runtime.closing import close_all
from slime_core.testing import tabular


class Tracker:
    """Raises at the end."""

    @hookimpl
    def slime_run_end(self):
        raise ConnectionError("the tracker's server is down")


class Engine(tabular.TabularEngine):
    """Does not close."""

    async def close(self):
        raise RuntimeError("the engine does not close")


class Trainer(tabular.TabularTrainer):
    """Says when it is closed."""

    async def close(self):
        logging.getLogger(__name__).warning("the trainer is closed")


class Failing:
    """Raises when it is told step 2, until `mended` is there."""

    def __init__(self, mended):
        self._mended = mended

    def _fail(self, step):
        if step == 2 and not self._mended.exists():
            raise ConnectionError("the tracker's server is down")


class FailingEnd(Failing):
    @hookimpl
    def slime_step_end(self, step):
        self._fail(step)


class FailingMetrics(Failing):
    @hookimpl
    def slime_step_metrics(self, step):
        self._fail(step)
        return {"more": float(step)}


def create_tracker(build):
    return Tracker()


def create_failing_end(build):
    return FailingEnd(build.run_dir.parent / "mended")


def create_failing_metrics(build):
    return FailingMetrics(build.run_dir.parent / "mended")


def create_engine(build):
    return Engine()


def create_trainer(build):
    trainer = tabular.create_trainer(build)
    trainer.__class__ = Trainer
    return trainer


class Plugin:
    """Raises at the end, and in step 2 if it is told to."""

    def __init__(self, *, stops):
        self._stops = stops

    @hookimpl
    def slime_rollout_end(self, step):
        if self._stops and step == 2:
            raise TrainerError("the cause")

    @hookimpl
    def slime_run_end(self):
        raise ValueError("a plugin has a mistake")


def end(letters, *, stops):
    registry = Registry()
    registry.hook_manager.register(Plugin(stops=stops), name="a plugin")
    flags = [
        *("--num-rollout", "2", "--tracker", f"{__name__}:create_tracker"),
        *("--rollout-engine", f"{__name__}:create_engine", "--train-backend", f"{__name__}:create_trainer"),
    ]
    settings = load_settings([str(letters)], flags, registry=registry)

    async def main():
        return await drive(await assemble(settings, registry))

    return asyncio.run(main())


ERRORS = (
    "slime_run_end of Tracker (tracker 1): the tracker's server is down",
    "slime_run_end of a plugin: a plugin has a mistake",
    "Engine was not closed: the engine does not close",
    "the trainer is closed",
)


def test_a_run_that_is_completed_stays_so_and_is_closed_whatever_fails_at_its_end(letters, caplog):
    assert end(letters, stops=False)["status"] == "completed"
    assert all(error in caplog.text for error in ERRORS)


def test_what_fails_at_the_end_does_not_hide_why_the_run_failed(letters, caplog):
    with pytest.raises(TrainerError, match="the cause"):
        end(letters, stops=True)
    assert all(error in caplog.text for error in ERRORS)
    summary = json.loads((letters.parent / "runs/letters/summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "TrainerError: the cause")


def rows(run):
    """Metrics of each step, without those of time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


@pytest.mark.parametrize(
    ("loop", "tracker", "save_interval"),
    [
        ("sync", "create_failing_end", "none"),
        ("sync", "create_failing_metrics", "none"),
        ("one-step-off", "create_failing_end", "none"),
        ("one-step-off", "create_failing_metrics", "1"),
    ],
)
def test_a_tracker_that_raises_after_a_step_costs_none_and_the_run_goes_on(
    letters, loop, tracker, save_interval
):
    """The row of step 2 is written before `slime_step_end` raises; where `slime_step_metrics` does it is not."""
    runs = letters.parent / "runs"

    def train(name):
        registry = Registry()
        flags = [
            *(
                "--run-name",
                name,
                "--loop",
                loop,
                "--num-rollout",
                "4",
                "--lr",
                "1.0",
                "--eval-interval",
                "2",
            ),
            *("--save-interval", save_interval, "--tracker", "jsonl", f"{__name__}:{tracker}"),
        ]
        settings = load_settings([str(letters)], flags, registry=registry)

        async def main():
            return await drive(await assemble(settings, registry))

        return asyncio.run(main())

    with pytest.raises(ConnectionError, match="the tracker's server is down"):
        train("letters")
    assert max(path.name for path in (runs / "letters/checkpoints").iterdir()) == "step_000002"
    summary = json.loads((runs / "letters/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    (runs / "mended").touch()
    assert train("letters")["eval_after"] == train("whole")["eval_after"]
    assert [row["step"] for row in rows(runs / "letters")] == [0, 1, 2, 3, 4]
    assert rows(runs / "letters") == rows(runs / "whole")


def test_a_close_that_is_cancelled_does_not_keep_the_next_part_open():
    closed = []

    class Waits:
        async def close(self):
            closed.append("waits")
            await asyncio.Event().wait()

    class Part:
        async def close(self):
            closed.append("part")

    async def main():
        task = asyncio.create_task(close_all([Waits(), Part()]))
        while not closed:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed == ["waits", "part"]


def create_idle_tracker(build):
    return SimpleNamespace(log=print)


def test_a_tracker_that_answers_no_hook_is_refused(letters):
    registry = Registry()
    settings = load_settings(
        [str(letters)], ["--tracker", f"{__name__}:create_idle_tracker"], registry=registry
    )

    async def main():
        return await drive(await assemble(settings, registry))

    with pytest.raises(
        PluginError,
        match="the tracker SimpleNamespace answers no hook; wanted methods such as slime_step_end",
    ):
        asyncio.run(main())
