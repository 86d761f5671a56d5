"""`parse_args`: a command line of the reference system as `args`, without a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from slime_core.cli.arguments import read_stages
from slime_core.config.functions import run_args
from slime_core.plugins.registry import Registry

from slime_compat.views.running.namespace import Args


def parse_args(add_custom_arguments: Callable[[Any], Any] | None = None) -> Args:
    """Return what the words of this process's command line mean, as hooks get it.

    Args:
        add_custom_arguments: adds arguments of a user's own to the parser that it is given.

    Raises:
        ConfigError: carries every problem.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser) or parser
    own, words = parser.parse_known_args()
    (stage,) = read_stages(
        [sys.argv[0], *words] if _is_theirs() else ["train.py", *words], Registry.from_environment()
    )
    return Args(run_args(stage.settings), **vars(own))


def _is_theirs() -> bool:
    return sys.argv[0].endswith(("train.py", "train_async.py"))
