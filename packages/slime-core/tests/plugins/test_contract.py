"""Plugins that cannot be called as their group is are told from their signatures."""

from __future__ import annotations

import functools
import os
import os.path

import pytest
from slime_core.plugins.contract import breach
from slime_core.plugins.registry import Registry

GROUPS = Registry().groups


def two(a, b): ...


async def two_async(a, b): ...


async def three_async(a, b, c): ...


def three(a, b, c): ...


def one(a, *, size=1, needed): ...


async def one_async(a): ...


async def yields(a, b, c):
    yield a


def needs_option(a, *, option): ...


def says_awaitable(ctx, sample, params) -> "Awaitable[Sample]": ...  # type: ignore[name-defined]  # noqa: F821, UP037 - text alone


@functools.wraps(three_async)
def wrapped(*args, **kwargs): ...


class Reward:
    def __init__(self, *, size=1): ...

    def __call__(self, sample): ...


class NoCall:
    def __init__(self, *, size=1): ...


class WrongCall:
    def __call__(self): ...


class Generator:
    async def __call__(self, ctx, sample, params): ...


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("slime.generators", three_async),
        ("slime.generators", functools.partial(three_async)),
        ("slime.generators", wrapped),
        ("slime.generators", says_awaitable),
        ("slime.generators", Generator()),
        ("slime.rewards", one),
        ("slime.rewards", one_async),
        ("slime.rewards", Reward),
        ("slime.filters", one),
        ("slime.losses", two),
        ("slime.losses", lambda *args, **options: None),
        ("slime.reducers", one),
        ("slime.numerics", {"train": {}}),
        ("slime.sources", len),  # written in C, and says what it takes
    ],
)
def test_what_can_be_called_is_taken(group, value):
    assert breach(GROUPS[group], value) is None


@pytest.mark.parametrize(
    ("group", "value", "found", "wanted"),
    [
        ("slime.generators", two_async, "the signature (a, b)", "async (ctx, sample, params, *, options)"),
        ("slime.generators", three, "a function that is not async", "`async def`"),
        ("slime.generators", yields, "a function that yields", "an async function that returns it"),
        ("slime.generators", os.path, "the module posixpath", "a function"),
        ("slime.generators", "text", "'text', which is str", "a function"),
        ("slime.generators", os.getcwd, "the signature ()", "async (ctx, sample, params, *, options)"),
        ("slime.generators", needs_option, "the signature (a, *, option)", "async (ctx"),
        ("slime.rewards", two, "the signature (a, b)", "(sample, *, options)"),
        ("slime.rewards", NoCall, "a class whose objects cannot be called", "a method __call__"),
        ("slime.rewards", WrongCall, "the signature (self)", "(sample, *, options)"),
        ("slime.filters", two, "the signature (a, b)", "(group, *, options)"),
        ("slime.filters", one_async, "an async function", "a plain one"),
        ("slime.losses", one, "the signature (a, *, size=1, needed)", "(view, advantages_T, *, options)"),
        ("slime.losses", two_async, "an async function", "a plain one"),
        ("slime.advantages", two, "the signature (a, b)", "(view, *, options)"),
        ("slime.reducers", two, "the signature (a, b)", "(view, *, options)"),
        ("slime.reward_transforms", one, "the signature (a, *, size=1, needed)", "(raw_rewards_N, group_ids_N"),
        ("slime.rollouts", one_async, "the signature (a)", "async (run, step, *, options)"),
        ("slime.rollouts", two, "a function that is not async", "`async def`"),
        ("slime.loops", two_async, "the signature (a, b)", "async (run)"),
        ("slime.engines", two, "the signature (a, b)", "(build)"),
        ("slime.sources", one_async, "an async function", "a plain one"),
        ("slime.loss_masks", two, "the signature (a, b)", "(conversation)"),
        ("slime.trackers", 3, "3, which is int", "a function"),
        ("slime.megatron_hooks", "text", "'text', which is str", "a function"),
        ("slime.numerics", ["train"], "['train'], which is list", "Mapping: section -> setting -> value"),
        ("slime.numerics", dict, "<class 'dict'>, which is type", "Mapping"),
        ("slime.models", {"model_type": "llama"}, "{'model_type': 'llama'}, which is dict", "ModelFamily"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_told_with_what_was_found(group, value, found, wanted):
    told = breach(GROUPS[group], value)
    assert told is not None
    assert told.found.startswith(found)
    assert wanted in told.wanted


@pytest.mark.parametrize(
    ("flag", "value", "fits"),
    [
        ("--custom-megatron-init-path", one_async, False),
        ("--custom-megatron-before-log-prob-hook-path", two, True),
        ("--custom-megatron-before-log-prob-hook-path", three, False),
        ("--custom-model-provider-path", two, False),
        ("--custom-model-provider-path", lambda c, a, *, pre_process, post_process: None, True),
        ("--custom-model-provider-path", lambda c, a, *, before, after: None, False),
    ],
)
def test_how_a_hook_is_called_depends_on_its_flag(flag, value, fits):
    assert (breach(GROUPS["slime.megatron_hooks"], value, flag=flag) is None) == fits


def test_every_group_of_callables_says_how_they_are_called():
    without = {group.name for group in GROUPS.values() if group.call is None and not group.call_of}
    assert without == {"slime.models", "slime.numerics", "slime.transports"}
    for group in GROUPS.values():
        assert set(group.call_of) <= set(group.flags)
        assert bool(group.has) == (group.name in without)


def test_how_a_group_is_called_is_what_its_contract_says():
    for group in GROUPS.values():
        if group.call is not None:
            words = [word.split("=")[0] for word in group.call.by_position]
            head = group.contract.partition(")")[0]
            assert [name for name in words if name in head] == words, group.name
            assert group.contract.startswith("async") == (group.call.is_async is True)
