"""How long prompts may be: of training, and of each evaluation set, as its own settings say; an engine with a context of 100 tokens."""

from __future__ import annotations

import json

import pytest
from slime_core.data import make_source
from slime_core.errors import DataError
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_context
from slime_core.testing.contracts.runs import tabular_settings

REGISTRY = Registry()


@pytest.fixture
def held_out(monkeypatch, tmp_path):
    """Build the evaluation source of two sets, `short` with a prompt of 20 letters and `long` with one of 60."""
    monkeypatch.setattr(make_source, "context_limit", lambda build: 100)
    for name, n in (("short", 20), ("long", 60)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input": "a" * n, "label": "x"}) + "\n")

    def built(*flags: str, short: str = "", long: str = ""):
        file = tmp_path / "sets.toml"
        file.write_text(
            "".join(
                f'[[eval.datasets]]\nname = "{name}"\npath = "{tmp_path}/{name}.jsonl"\n{more}\n'
                for name, more in (("short", short), ("long", long))
            )
        )
        words = ("--eval-interval", "1", "--eval-config", str(file), *flags)
        with tabular_settings(REGISTRY, *words) as settings:
            return make_source.make_eval_source(make_context(settings, REGISTRY))

    return built


@pytest.mark.parametrize(
    ("flags", "short", "long"),
    [
        (("--eval-max-response-len", "40"), "", ""),  # 60 and 40 are 100
        (("--eval-max-response-len", "100"), "max_response_len = 80", "max_response_len = 40"),
        (("--eval-max-response-len", "100", "--eval-max-context-len", "61"), "", ""),  # responses are cut off
        (("--eval-max-context-len", "21"), "", "max_context_len = 61"),
        (("--rollout-max-response-len", "100", "--rollout-max-context-len", "100", "--eval-max-context-len", "100"), "", ""),
    ],
)  # fmt: skip
def test_prompts_that_leave_room_by_the_settings_of_their_own_set_are_taken(held_out, flags, short, long):
    assert len(held_out(*flags, short=short, long=long)) == 2


@pytest.mark.parametrize(
    ("flags", "short", "long", "told"),
    [
        (
            ("--eval-max-response-len", "41"), "", "",
            "long.jsonl:1: found a prompt of 60 tokens; wanted at most 59, which the engine's context of 100 tokens with "
            "eval_max_response_len 41 leaves",
        ),
        (
            (), "max_response_len = 81", "",
            "short.jsonl:1: found a prompt of 20 tokens; wanted at most 19, which the engine's context of 100 tokens with "
            "eval_max_response_len 81 leaves",
        ),
        (
            ("--eval-max-context-len", "60"), "", "",
            "long.jsonl:1: found a prompt of 60 tokens; wanted at most 59, which eval.eval_max_context_len 60 leaves",
        ),
        (
            (), "max_context_len = 10", "",
            "short.jsonl:1: found a prompt of 20 tokens; wanted at most 9, which eval.eval_max_context_len 10 leaves",
        ),
    ],
)  # fmt: skip
def test_a_prompt_that_leaves_none_is_refused_before_the_run(held_out, flags, short, long, told):
    with pytest.raises(DataError) as raised:
        held_out(*flags, short=short, long=long)
    (line,) = str(raised.value).splitlines()
    assert line.endswith(told + "; drop such prompts (--eval-max-prompt-len), or allow more")
