"""Locking and checking the folder of a run before anything in it is written or deleted, and recording its settings."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rundir import checkpoint
from slime_core.rundir.rundir import RunDir

logger = logging.getLogger(__name__)

#: A path whose only fields are whole numbers of the step.
_PATTERN = re.compile(
    r"(?:[^{}]|\{(?:step|rollout_id)(?::0?[0-9]{0,2}d?)?\})*\{(?:step|rollout_id)(?::0?[0-9]{0,2}d?)?\}[^{}]*"
)
_FIELD = re.compile(r"\{[^{}]*\}")
#: Bytes that the name of a Hugging Face folder is longer by while it is written, and of paths below a folder.
_ADDED, _BELOW = 16, 128


def take_folder(run_dir: RunDir, settings: Settings, *, model: Path) -> None:
    """Create and lock the folder of a run, until it is released; `run.overwrite` deletes an earlier run of the name.

    Before anything is deleted or written, what is there already is read, and another run's checkpoint is found whole.

    Raises:
        CheckpointError: the run is to start from a checkpoint that is not there, or damaged.
        ConfigError: another process has the folder; or what would be deleted is no run, or is what the run starts from; or
            a file of an earlier run is damaged.
    """
    overwrite, load = settings.run.overwrite, settings.checkpoint.load
    found = checkpoint.to_start_from(None if overwrite else run_dir.checkpoints, load=load)
    if overwrite:
        start = [("model.hf_checkpoint", model)] + ([("checkpoint.load", found.path)] if found else [])
        if inside := list(_deleted([*start, *inputs(settings)], run_dir.path)):
            raise ConfigError(inside)
    if found is not None and found.path.parent != run_dir.checkpoints:
        found.verify()
    run_dir.take(anew=overwrite)
    try:
        if problems := run_dir.problems():
            raise ConfigError(problems)
        run_dir.create()
    except BaseException:
        run_dir.release()
        raise


def inputs(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield (setting, path) of every folder and file that a run reads by its settings; a name of a model is one that is not there."""
    for table, section in settings.sections.items():
        for field in section.reads:
            given = getattr(section, field)
            for each in given if isinstance(given, list) else [given]:
                if each is not None:
                    yield f"{table}.{field}", Path(each)


def emptied_inputs(settings: Settings, folders: Iterable[Path]) -> Iterator[Problem]:
    """Yield what a run reads in folders that are to be emptied."""
    for folder in folders:
        yield from _deleted(inputs(settings), folder)


def _deleted(paths: Iterable[tuple[str, Path]], folder: Path) -> Iterator[Problem]:
    """Yield the paths that are in a folder that is to be emptied, each setting once."""
    told = set()
    for where, path in paths:
        if where not in told and path.resolve().is_relative_to(folder.resolve()):
            told.add(where)
            found = f"{path}, which --overwrite would delete"
            yield Problem(where, found, f"one outside {folder}", "give another --run-name")


def folder_problems(settings: Settings) -> Iterator[Problem]:
    """Yield why the folders that a run is to write cannot be made, as far as it can be known without making them."""
    run, saving = settings.run, settings.checkpoint
    parts = Path(run.run_name).parts
    if not parts or Path(run.run_name).is_absolute() or ".." in parts:
        yield Problem("run.run_name", ascii(run.run_name), "the name of a folder below run.output_dir")
        return
    if run.run_name.strip() != run.run_name or not run.run_name.isprintable():
        shown = "a name without blanks around it and characters that a terminal does not show"
        yield Problem("run.run_name", ascii(run.run_name[:80]), shown)
        return
    folder = Path(run.output_dir) / run.run_name
    if why := _unwritable(folder):
        where = "run.output_dir" if _unwritable(Path(run.output_dir)) else "run.run_name"
        yield Problem(where, *why)
    if saving.save_hf is None:
        return
    if not _PATTERN.fullmatch(saving.save_hf):
        yield Problem(
            "checkpoint.save_hf", ascii(saving.save_hf), "a path with {step} in it, as in out/step_{step}"
        )
        return
    last = run.num_rollout or 1
    hf = Path(saving.save_hf.format(step=last, rollout_id=last - 1))
    if why := _unwritable(hf, added=_ADDED):
        yield Problem("checkpoint.save_hf", *why)
    elif _holds(folder / "checkpoints", hf) or _holds(hf, folder) or _holds(folder / "rollouts", hf):
        yield Problem(
            "checkpoint.save_hf", str(hf), "a folder apart from the run's own checkpoints and samples"
        )
    for where, path in inputs(settings):
        if _may_be(saving.save_hf, path):
            found = f"{saving.save_hf}, which may be {path}, that of {where}"
            yield Problem("checkpoint.save_hf", found, "folders apart from what the run reads")


def _may_be(pattern: str, path: Path) -> bool:
    """Return whether a path with fields of the step may be that of a folder that is there."""
    if not path.is_dir():
        return False
    *fixed, last = _FIELD.split(os.path.abspath(pattern))
    wanted = re.compile("".join(f"{re.escape(part)}[0-9]+" for part in fixed) + re.escape(last))
    return any(wanted.fullmatch(form(path)) for form in (os.path.abspath, os.path.realpath))


def _unwritable(folder: Path, *, added: int = 0) -> tuple[str, str] | None:
    """Return (what was found, what was wanted) of a folder that cannot be made or written to; None where it seems to be."""
    try:
        there = next(
            path for path in (folder, *folder.absolute().parents) if os.path.lexists(os.fsencode(path))
        )
        str(folder).encode()  # as config.toml has it
        if "\0" in str(folder):
            raise ValueError("with a null character")
        longest = max(len(os.fsencode(part)) for part in folder.parts) + added
        whole = len(os.fsencode(folder.absolute())) + _BELOW
        if not there.is_dir():
            return f"{folder}, and {there} is no folder", "a folder, or one that can be made"
        if longest > os.pathconf(there, "PC_NAME_MAX") or whole > os.pathconf(there, "PC_PATH_MAX"):
            return f"a path of {len(str(folder))} characters, {str(folder)[:60]}...", "a shorter one"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{folder}, and {there} may not be written to", "a folder that this process may write to"
    except (OSError, ValueError) as error:
        return f"{str(folder)[:80]!a} ({error})", "the path of a folder"
    return None


def _holds(outer: Path, inner: Path) -> bool:
    return inner.resolve().is_relative_to(outer.resolve())


def record(run_dir: RunDir, settings: Settings, registry: Registry, *, goes_on: bool) -> None:
    """Write the settings and plugins of a run that starts; if it resumes, log which settings have changed."""
    if goes_on and (changed := changes(run_dir, settings)):
        logger.warning("%s goes on with other settings than before: %s", run_dir.path, ", ".join(changed))
    run_dir.write_text(run_dir.config.name, settings.to_toml())
    run_dir.write_json("plugins.lock.json", registry.lock())


def changes(run_dir: RunDir, settings: Settings) -> list[str]:
    """Return which settings are not those that the folder's run had, each as `section.key old -> new`."""
    before = run_dir.read_config()
    if not before:
        return []
    return [
        f"{table}.{key} {before[table][key]!r} -> {value!r}"
        for table, values in tomllib.loads(settings.to_toml()).items()
        for key, value in values.items()
        if before.get(table, {}).get(key, value) != value and (table, key) != ("run", "overwrite")
    ]
