"""What the checks of this package say of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.testing.tabular import LetterTokenizer
from slime_sglang import hooks


@pytest.fixture
def registry() -> Registry:
    return Registry.from_environment()


@pytest.fixture
def problems_of(registry: Registry) -> Callable[..., list[str]]:
    """What is wrong with a run whose trainer starts from a folder and whose engine is SGLang, with more flags."""

    def find(folder: Path, *more: str) -> list[str]:
        given = ["--rollout-batch-size", "1", "--rollout-max-response-len", "8"]
        given += ["--rollout-engine", "sglang", "--hf-checkpoint", str(folder), *more]
        build = BuildContext(
            settings=load_settings([], given, registry=registry),
            registry=registry,
            load_tokenizer=LetterTokenizer,
            model_path=folder,
            run_dir=folder,
        )
        return [str(problem) for problem in hooks.slime_check_build(build=build)]

    return find
