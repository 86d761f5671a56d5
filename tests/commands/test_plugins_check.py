"""`slime plugins check` says of a third party's plugin which promise of its kind it breaks, in one line each."""

from __future__ import annotations

import os

import pytest

from .test_bad_input import plugin

#: Group and name of a plugin that is broken -> what is said of it.
SAID = {
    "slime.advantages acme/unimportable": "does not import: ImportError: libacme.so is missing",
    "slime.losses acme/narrow": "found the signature (view) (too many positional arguments); wanted one that can be called",
    "slime.generators acme/plain": "found a function that is not async; wanted `async def`, called as async (ctx, sample, params, *, options)",
    "slime.reducers acme/waits": "found an async function; wanted a plain one, called as (view, *, options)",
    "slime.rewards acme/silent": "found no docstring; wanted one, which `slime plugins show` prints",
    "slime.engines acme/no-factory": "found 3, which is int; wanted a function, called as (build)",
    "slime.engines acme/of-trainers": "found of the type TrainerFactory; wanted EngineFactory",
    "slime.engines acme/loose": "found create that is of the type int; wanted a function",
    "slime.trainers acme/other-capabilities": "found capabilities that are of the type EngineCapabilities; wanted TrainerCapabilities",
    "slime.rewards acme/wordy": "sample 0: returned str 'good'; a reward returns a finite number, a Grade, or a dict",
    "slime.filters acme/yes": "found True; wanted None to keep the group, or the reason to drop it, as text",
    "slime.trackers acme/unmarked": "Tracker.slime_step_end: found no mark; wanted @hookimpl before it",
    "slime.reward_transforms acme/short": "found the shape (5,) for 6; wanted rewards [N] float64, finite",
    "slime.reducers acme/nan": "nan",
    "slime.numerics acme/listed": "which is list; wanted Mapping: section -> setting -> value",
    "slime acme/acme": "acme_hooks.slime_run_end: found no mark; wanted @hookimpl before it",
}  # fmt: skip
HEALTHY = ["slime.rewards acme/fine", "slime.engines acme/fine", "slime.reducers acme/fine"]

SOURCE = """
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.protocols import EngineCapabilities
from slime_core.testing import tabular

def narrow(view): "One argument."
def plain(ctx, sample, params): "Not async."
async def waits(view): "Async."
def silent(sample): return 1.0
no_factory = 3
of_trainers = tabular.create_trainer
loose = EngineFactory(7)
other_capabilities = TrainerFactory(lambda build: None, EngineCapabilities())
def wordy(sample):
    "Text."
    return "good"
def yes(group):
    "True."
    return True
class Tracker:
    def slime_step_end(self, step, metrics): "Not marked."
def unmarked(build):
    "A tracker."
    return Tracker()
def short(rewards, groups):
    "One too few."
    return rewards[1:]
def nan(view):
    "Divides by 0 where nothing is trained on."
    return view.loss_mask / view.loss_mask.sum()
listed = ["train"]
def fine(sample, *, size=1):
    "Well."
    return {"score": 1.0}
fine_engine = tabular.create_engine
def fine_reducer(view):
    "Well."
    return view.loss_mask
"""
ENTRY_POINTS = """
[slime.advantages]
unimportable = acme_bad:f
[slime.losses]
narrow = acme:narrow
[slime.generators]
plain = acme:plain
[slime.reducers]
waits = acme:waits
nan = acme:nan
fine = acme:fine_reducer
[slime.rewards]
silent = acme:silent
wordy = acme:wordy
fine = acme:fine
[slime.engines]
no-factory = acme:no_factory
of-trainers = acme:of_trainers
loose = acme:loose
fine = acme:fine_engine
[slime.trainers]
other-capabilities = acme:other_capabilities
[slime.filters]
yes = acme:yes
[slime.trackers]
unmarked = acme:unmarked
[slime.reward_transforms]
short = acme:short
[slime.numerics]
listed = acme:listed
[slime]
acme = acme_hooks
"""


@pytest.fixture(scope="module")
def checked(slime, tmp_path_factory):
    """The lines and the status of `slime plugins check` with a distribution that is broken in many ways."""
    env = plugin(
        tmp_path_factory.mktemp("site"),
        "acme",
        ENTRY_POINTS,
        acme=SOURCE,
        acme_bad="raise ImportError('libacme.so is missing')\n",
        acme_hooks='"""Hooks of acme."""\n\n\ndef slime_run_end(summary):\n    "Not marked."\n',
    )
    ended = slime("plugins", "check", env=os.environ | env | {"SLIME_PLUGINS": "acme"})
    assert "Traceback" not in ended.stdout + ended.stderr
    return ended.stdout.splitlines(), ended.returncode


@pytest.mark.parametrize("what", SAID)
def test_a_broken_promise_is_told_in_one_line(checked, what):
    lines, status = checked
    assert status == 1
    (line,) = [line for line in lines if f"{what}:" in line]
    assert line.startswith("bad ")
    assert SAID[what] in line
    assert not any(line.startswith(f"ok  {what}") for line in lines)


def test_nothing_else_is_refused(checked):
    lines, _ = checked
    assert sum(line.startswith("bad ") for line in lines) == len(SAID)
    for what in HEALTHY:
        assert any(line.startswith(f"ok  {what}") for line in lines)


def test_what_is_not_tried_is_told_with_the_reason(checked):
    lines, _ = checked
    (line,) = [line for line in lines if "slime.engines acme/fine" in line]
    assert (
        "not tried: it needs a model to be started on; a test calls slime_core.testing.contracts.check_engine"
        in line
    )


@pytest.mark.parametrize("answer", ["True", "False", "''", "0"])
def test_a_filter_that_says_neither_is_refused_by_name_when_it_runs(slime, letters, tmp_path, answer):
    env = plugin(tmp_path / "site", "acme", "", acme_keep=f"def keep(group):\n    return {answer}\n")
    result = slime("train", letters, "--dynamic-sampling-filter-path", "acme_keep:keep", env=os.environ | env)
    assert result.returncode == 2
    assert f"the filter acme_keep:keep returned {answer}; wanted None to keep the group, or" in result.stderr


@pytest.mark.parametrize(
    ("flag", "source", "said"),
    [
        ("--rollout-engine", "from slime_core.testing.tabular import create_trainer as made", "wanted EngineFactory"),
        ("--train-backend", "from slime_core.testing.tabular import create_engine as made", "wanted TrainerFactory"),
        (
            "--rollout-engine",
            "from slime_core.config.factories import EngineFactory\nmade = EngineFactory(print, {'transports': []})",
            "capabilities that are of the type dict; wanted EngineCapabilities",
        ),
    ],
)  # fmt: skip
def test_a_factory_of_another_kind_is_refused_by_check(slime, letters, tmp_path, flag, source, said):
    env = plugin(tmp_path / "site", "acme", "", acme_made=source + "\n")
    result = slime("check", letters, flag, "acme_made:made", env=os.environ | env)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "acme_made:made" in result.stderr
    assert said in result.stderr
