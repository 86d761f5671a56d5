"""Arguments of SGLang's server as settings: which there are, and how they are given."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_sglang.server.command import server_arguments
from slime_sglang.settings.section import SglangSection, known_arguments

SCRIPT = Path(__file__).parents[4] / "scripts/sglang_flags.py"
REQUIRED = ("--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--rollout-engine", "sglang")


def test_the_list_of_arguments_is_that_of_the_installed_sglang() -> None:
    spec = importlib.util.spec_from_file_location("sglang_flags", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert sorted(known_arguments()) == script.flags()


def test_an_argument_of_sglang_is_a_flag_with_its_prefix() -> None:
    settings = load_settings(
        [],
        [*REQUIRED, "--hf-checkpoint", "m", "--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics"],
        registry=Registry.from_environment(),
    )
    given = settings.section(SglangSection).server_args
    assert server_arguments(given) == ["--mem-fraction-static", "0.8", "--enable-metrics"]
