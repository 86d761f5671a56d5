"""`find`: which checkpoint a path means, of a run or of Megatron, and what its run's settings say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import CheckpointError
from slime_core.files.checksums import MANIFEST
from slime_core.files.strict_read import Unreadable, read_file
from slime_core.rundir import checkpoint
from slime_core.rundir.rundir import RunDir

from slime_megatron.settings.manifest import DESCRIPTION

#: Beside the weights of a converted folder: config, tokenizer and whatever else the Hugging Face folder held.
HF = "hf"
#: Megatron's own file beside the folders of iterations, and what it says when there is but one set of weights.
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A Megatron checkpoint, and what was found beside it."""

    weights: Path
    """Folder in the format `torch_dist`."""
    model: str | None
    """Name or Hugging Face folder of the model that the checkpoint came from; None where nothing says so."""
    start: str | None = None
    """Name or folder of the weights that its run started from (`--actor-load`), where those were not the model's own."""
    model_name: str | None = None
    """Family that its run was told (`--model-name`); None where the model's config.json says it."""


def find(source: Path) -> MegatronCheckpoint:
    """Return the checkpoint that a path means: a run, one of its checkpoints, or a Megatron folder.

    Those of runs are found whole; folders of Megatron have no checksums.

    Raises:
        CheckpointError: it is none of these, or damaged.
        ConfigError: the run's config.toml is damaged.
    """
    if (source / "checkpoints").is_dir():
        newest = checkpoint.latest(source / "checkpoints")
        if newest is None:
            raise CheckpointError(
                f"{source}: the run has no checkpoint yet; wait until it has ended, or set --save-interval"
            )
        newest.verify()
        return _of_run(newest.trainer, source)
    if (named := checkpoint.at(source)) is not None:
        named.verify()
        return _of_run(named.trainer, named.path.resolve().parent.parent)
    if (source / DESCRIPTION).is_file():
        whole = checkpoint.at(source.parent)
        if source.name == checkpoint.TRAINER and whole is not None and (whole.path / MANIFEST).exists():
            whole.verify()
        return _of_run(source, source.resolve().parent.parent.parent)
    if (source / TRACKER).is_file():
        iteration = _iteration(source / TRACKER)
        name = iteration if iteration == RELEASE else f"iter_{iteration:0>7}"
        model = source / HF
        return MegatronCheckpoint(source / name, str(model) if model.is_dir() else None)
    if (source / ".metadata").is_file():
        return MegatronCheckpoint(source, None)
    raise CheckpointError(
        f"{source}: no checkpoint; wanted a run's folder, a folder checkpoints/step_N of one, or a folder of "
        "Megatron in the format torch_dist"
    )


def _iteration(tracker: Path) -> str:
    """Return which iteration Megatron wrote last."""
    try:
        iteration = read_file(tracker).decode("ascii").strip()
        if iteration != RELEASE and not re.fullmatch("[0-9]{1,18}", iteration):
            raise Unreadable(ascii(iteration[:40]))
    except ValueError as error:
        raise CheckpointError(f"{tracker}: found {error}; wanted {RELEASE} or a number") from error
    return iteration


def _of_run(weights: Path, run: Path) -> MegatronCheckpoint:
    """Return weights of a run, and what its settings say of them."""
    config = RunDir(run).read_config()
    said = [
        config.get(section, {}).get(name)
        for section, name in (("model", "hf_checkpoint"), ("roles", "actor_load"), ("model", "model_name"))
    ]
    model, start, model_name = (value if isinstance(value, str) else None for value in said)
    return MegatronCheckpoint(weights, model, start, model_name)
