"""Flags that nothing reads are refused beside functions that keep `args` to themselves, but for those that these may read."""

from __future__ import annotations

import importlib
import textwrap

import pytest
from slime_compat.adapters.attributes import settings_read
from slime_core.checks.unread_flags import unread_flags
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

NEEDED = ("--hf-checkpoint", "m", "--rollout-batch-size", "4", "--rollout-max-response-len", "8")


@pytest.fixture(scope="module")
def registry():
    return Registry()


@pytest.fixture
def unread(registry):
    def told(*flags: str) -> list[str]:
        settings = load_settings([], [*NEEDED, *flags], registry=registry)
        return [problem.where for problem in unread_flags([settings], registry)]

    return told


def test_a_reward_that_keeps_args_to_itself_reads_what_its_file_names(unread):
    own = ("--custom-rm-path", "own_rewards.keeps_it")
    assert unread(*own, "--lambd", "0.9", "--eps-clip", "0.3") == ["algos.lambd"]
    assert unread(*own, "--gamma", "0.9") == []
    assert unread(*own, "--max-staleness-policy", "drop") == ["rollout.max_staleness_policy"]


def test_a_function_of_samples_reads_what_follows_from_settings(unread):
    flags = ("--advantage-estimator", "ppo", "--disable-grpo-std-normalization")
    assert unread(*flags) == ["algorithm.disable_grpo_std_normalization"]
    own = ("--custom-reward-post-process-path", "own_rewards.of_samples")
    assert unread(*own, *flags) == []
    assert unread(*own, "--advantage-estimator", "ppo", "--turn-discount", "0.9") == ["algos.turn_discount"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--custom-rm-path", "own_rewards_elsewhere.kept"),
        ("--custom-advantage-function-path", "own_advantages.of_rewards"),
        ("--custom-generate-function-path", "tool_generate.generate"),
    ],
)
def test_nothing_is_refused_where_others_may_read_args(unread, flags):
    assert unread(*flags, "--lambd", "0.9") == []


@pytest.mark.parametrize(
    "body",
    [
        "return args.gamma",
        "return getattr(args, 'gamma')",
        "return helper(sample, args=args) + helper(sample, args)",
        "return [sample.get_reward_value(args) for _ in range(2)]",
        "args.found = lambda: args.gamma",
    ],
)
def test_args_that_stay_in_the_file_are_read_by_its_words(tmp_path, monkeypatch, body):
    words = settings_read(written(tmp_path, monkeypatch, body))
    assert words is not None and {"args", "sample", "lambd"} <= words


@pytest.mark.parametrize(
    "body",
    [
        "return helper(args, sample)",  # which calls it something else
        "return getattr(args, sample)",
        "return args.__dict__",
        "return args._get_kwargs()",
        "return vars(args)",
        "return locals()",
        "return json.dumps(args)",
        "return [args]",
        "kept = args",
        "return f'{args}'",
        "return helper(*sample, **{'args': args})",
        "return other(args)",
    ],
)
def test_args_that_leave_the_file_may_be_read_anywhere(tmp_path, monkeypatch, body):
    assert settings_read(written(tmp_path, monkeypatch, body)) is None


@pytest.mark.parametrize("head", ["@functools.cache\ndef", "class A:\n  def"])
def test_nothing_is_known_of_what_is_decorated_or_not_at_the_top(tmp_path, monkeypatch, head):
    text = f"import functools\n{head} fn(args, sample): return 0\n"
    module = imported(tmp_path, monkeypatch, text)
    assert settings_read(getattr(module, "A", module).fn) is None
    assert settings_read(len) is None


def written(tmp_path, monkeypatch, body: str):
    """Return a function of a file of its own."""
    text = f"""
    import json
    from json import dumps as other

    def fn(args, sample):
        {body}

    def helper(sample, args):
        return args.lambd
    """
    return imported(tmp_path, monkeypatch, textwrap.dedent(text)).fn


def imported(tmp_path, monkeypatch, text: str):
    name = f"read_settings_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)
