"""Hooks of slime-torch: its section, and checks that the engine runs the model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slime_core.config.derive import is_local
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry
from slime_core.weights.sync import transport_problems, wanted_transport
from slime_models.groups import is_by_ranks
from slime_models.hf.config import missing_weights

from slime_torch.section import CAPABILITIES, TorchSection

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext

#: Our engine.
_OURS = "slime-torch/torch"


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `torch`."""
    return [Section("torch", TorchSection)]


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse a weight transport that the engine lacks, or that is for ranks of servers."""
    if not means(settings.rollout.rollout_engine, _OURS):
        return
    yield from transport_problems(settings.train, "engine torch", CAPABILITIES, registry)
    transport = wanted_transport(settings.train)
    if is_by_ranks(transport, registry):
        yield Problem(
            "train.update_weight_transport",
            f"{transport} with the engine torch, which has no servers whose ranks could join",
            f"one of {', '.join(CAPABILITIES.transports)}",
        )


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse a model whose weights the engine cannot generate with, and a folder that has none."""
    if not means(build.settings.rollout.rollout_engine, _OURS):
        return
    from slime_torch.factory import context_limit, misfit  # imports torch

    if why := misfit(build):
        found = f"torch with {build.model_path}"
        yield Problem("rollout.rollout_engine", found, "an engine that runs the model", why)
    else:
        yield from _cache_problems(build.section(TorchSection).max_total_tokens, context_limit(build))
    if is_local(build.settings.run):
        yield from missing_weights(build.model_path)


def _cache_problems(room: int | None, longest: int) -> Iterable[Problem]:
    if room is not None and room < longest:
        yield Problem(
            "torch.max_total_tokens",
            f"{room}, and a context of {longest} tokens",
            f"{longest} at least: the KV cache holds a request of the whole context",
            f"give more, or a shorter context: --torch-max-context-len {room}",
        )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of PyTorch and numba."""
    absent = {
        "torch": "not installed; slime-torch needs it",
        "numba": "not installed; with slime-torch[jit] the engine torch decodes faster on a CPU",
    }
    return {name: _version(name) or sentence for name, sentence in absent.items()}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
