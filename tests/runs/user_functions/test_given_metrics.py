"""Metrics that functions and plugins of a user's own add: numbers are in the rows, anything else ends the run in its step."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch
from slime_core.config.load import load_settings
from slime_core.errors import PluginError
from slime_core.launch.local import drive
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.rollout.rollouts.default import rollout
from slime_core.run.assemble import assemble
from slime_core.run.evaluation import evaluate

from ..test_loop import rows

#: What each of the functions adds to the metrics; a test chooses it.
GIVEN: dict[str, object] = {}


def rollout_log(rollout_id, args, samples, metrics, rollout_time):
    metrics |= GIVEN
    return False


def eval_log(rollout_id, args, data, metrics):
    metrics |= GIVEN
    return False


async def evaluation(run, step, source):
    return await evaluate(run, step, source), dict(GIVEN)


async def adding(run, step):
    run.add_metrics(dict(GIVEN))
    return await rollout(run, step)


class Plugin:
    """Adds metrics at the end of a step, or of its rollout."""

    def __init__(self, at):
        self._at = at

    @hookimpl
    def slime_step_metrics(self):
        return dict(GIVEN) if self._at == "step" else {}

    @hookimpl
    def slime_rollout_end(self, run):
        if self._at == "rollout":
            run.add_learned(dict(GIVEN))


PLACES = {
    "--custom-rollout-log-function-path": (
        "rollout_log",
        "the function of --custom-rollout-log-function-path",
    ),
    "--custom-eval-rollout-log-function-path": (
        "eval_log",
        "the function of --custom-eval-rollout-log-function-path",
    ),
    "--eval-function-path": ("evaluation", "the function of --eval-function-path"),
    "--rollout-function-path": ("adding", "run.add_metrics"),
    "step": ("", "slime_step_metrics of a plugin"),
    "rollout": ("", "run.add_learned"),
}


def train(letters, place, given):
    GIVEN.clear()
    GIVEN.update(given)
    function, _ = PLACES[place]
    registry = Registry()
    registry.hook_manager.register(Plugin(place), name="a plugin")
    flags = [place, f"{__name__}:{function}"] if function else []
    flags += ["--num-rollout", "1", "--eval-interval", "1", "--skip-eval-before-train"]
    settings = load_settings([str(letters)], flags, registry=registry)

    async def main():
        return await drive(await assemble(settings, registry))

    return asyncio.run(main())


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_number_ends_the_run_in_its_step_and_the_mended_run_goes_on(letters, tmp_path, place):
    with pytest.raises(PluginError) as caught:
        train(letters, place, {"mine/list": [1.0, 2.0]})
    told = f"{PLACES[place][1]}: found the metric 'mine/list' as list '[1.0, 2.0]'; wanted a number"
    assert str(caught.value) == told
    run = tmp_path / "runs/letters"
    assert not (run / "metrics.jsonl").exists()
    numbers = {
        "mine/numpy": np.float32(0.5), "mine/array": np.array(3), "mine/torch": torch.tensor(0.25), "mine/nan": math.nan,
    }  # fmt: skip
    assert train(letters, place, numbers)["status"] == "completed"
    (row,) = rows(run)
    assert (row["step"], row["mine/numpy"], row["mine/array"], row["mine/torch"]) == (1, 0.5, 3.0, 0.25)
    assert math.isnan(row["mine/nan"])
