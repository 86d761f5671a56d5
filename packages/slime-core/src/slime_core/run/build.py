"""Making the `BuildContext` of a run: model and plugins by name, and what is wrong between them and the settings."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from slime_core.checks.chosen_plugins import plugin_problems
from slime_core.checks.input_files import model_problems
from slime_core.config.build import BuildContext, Rank
from slime_core.config.derive import run_folder
from slime_core.config.model_fit import check_build
from slime_core.config.settings import Settings
from slime_core.config.user_factories import naming
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Tokenizer
from slime_core.run.template_day import set_day
from slime_core.runtime.progress import ON_TERMINAL

logger = logging.getLogger(__name__)

#: Groups of the plugins that are imported for the checks between settings, model and plugins.
_ASKED = frozenset({"slime.engines", "slime.tokenizers", "slime.trainers"})


def resolve_model(name: str, registry: Registry) -> Path:
    """Return the local folder of a model: the folder itself, or what an installed plugin fetches.

    Raises:
        ConfigError: there is no such folder and no plugin knows the name.
    """
    if os.path.isdir(name):
        return Path(name)
    path: Path | None = registry.hooks.slime_resolve_model(name=name)
    if path is None:
        raise ConfigError(model_problems(name, registry))
    return path


def make_build(
    settings: Settings, registry: Registry, *, begin: Callable[[BuildContext], None] | None = None
) -> BuildContext:
    """Check settings, model and plugins against each other, and return what the factories build from, its tokenizer read.

    Args:
        settings: of the run.
        registry: the installed plugins.
        begin: called with it when all is checked but the plugins of other groups than `_ASKED`, and the tokenizer: to import
            them takes seconds, beside which something else may begin.

    Raises:
        ConfigError: carries every problem between settings, model and chosen plugins.
    """
    logger.info("importing %s", ", ".join(_long_imports(settings)), extra=ON_TERMINAL)
    if any(True for _ in plugin_problems(settings, registry, _ASKED)):
        raise ConfigError(list(plugin_problems(settings, registry)))
    build = make_context(settings, registry)
    if problems := check_build(build):
        raise ConfigError(problems)
    if begin is not None:
        begin(build)
    if problems := list(plugin_problems(settings, registry)):
        raise ConfigError(problems)
    build.load_tokenizer()
    return build


def make_context(settings: Settings, registry: Registry, *, rank: Rank | None = None) -> BuildContext:
    """Return what the factories build from, of settings that are checked; imports no plugin, and reads no tokenizer.

    Raises:
        ConfigError: there is no such model.
    """
    path = resolve_model(settings.model.hf_checkpoint, registry)

    @functools.cache
    def load_tokenizer() -> Tokenizer:
        logger.info("reading the tokenizer of %s", path, extra=ON_TERMINAL)
        with naming(registry, "slime.tokenizers", settings.model.tokenizer, where="model.tokenizer"):
            tokenizer: Tokenizer = registry.resolve("slime.tokenizers", settings.model.tokenizer)(path)
        set_day(tokenizer, settings)
        return tokenizer

    return BuildContext(
        settings=settings,
        registry=registry,
        load_tokenizer=load_tokenizer,
        model_path=path,
        run_dir=run_folder(settings),
        rank=rank or Rank(),
    )


def _long_imports(settings: Settings) -> list[str]:
    """Return the names of packages that take long to import, for a line of progress."""
    trainer, engine = (
        settings.train.train_backend,
        settings.rollout.rollout_engine,
    )
    return [f"the trainer {trainer}", f"the engine {engine}"]
