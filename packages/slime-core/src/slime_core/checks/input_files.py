"""Checks that the files and folders that settings name exist."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slime_core.config.base import Unset
from slime_core.config.derive import FILE_SOURCE, run_folder
from slime_core.config.eval_sets import eval_sets
from slime_core.config.settings import Settings
from slime_core.data.rows.open_rows import file_problem, names_file
from slime_core.errors import CheckpointError, Problem
from slime_core.files.json_text import shown
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry
from slime_core.rundir.checkpoint import to_start_from

#: How the names of models on a hub look: whether there is one is known when it is fetched.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def missing_files(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield a problem for each file or folder that is named and does not exist."""
    for check in (_data, _checkpoint):
        with contextlib.suppress(Unset):
            yield from check(settings)
    with contextlib.suppress(Unset):
        yield from _held_out(settings, registry)
    with contextlib.suppress(Unset):
        yield from model_problems(settings.model.hf_checkpoint, registry)


def model_problems(name: str, registry: Registry) -> Iterator[Problem]:
    """Yield that a model is no folder, and no name that an installed plugin may know."""
    known = [known for answer in registry.hooks.slime_list_models() for known, _ in answer]
    if os.path.isdir(name) or name in known or _HUB_NAME.fullmatch(name):
        return
    listed = ", ".join(known) or "(install slime-models)"
    if registry.hooks.slime_resolve_model(name=name) is None:
        yield Problem("model.hf_checkpoint", shown(name, 300), f"a Hugging Face folder, or one of: {listed}")


def _data(settings: Settings) -> Iterator[Problem]:
    data = settings.data
    if data.disable_rollout_global_dataset:
        return
    if means(data.data_source_path, FILE_SOURCE) and data.prompt_data:
        words = data.prompt_data
        if len(words) > 1 and (len(words) % 2 or len(set(words[::2])) < len(words[::2])):
            wanted = "one file, or names and files in turn, each name once: math math.jsonl code code.jsonl"
            yield Problem("data.prompt_data", shown(words), wanted)
            return
        if len(words) > 1:
            named = list(_unreadable_names("data.prompt_data", words[::2]))
            yield from named
            if named:
                return
        for spec in words[1::2] or words:
            yield from _unreadable("data.prompt_data", spec)


def _unreadable_names(where: str, names: Sequence[str]) -> Iterator[Problem]:
    """Yield names of files that cannot be read, or that are files themselves: of those only every second would be used."""
    for name in names:
        if names_file(name):
            wanted = "a name before each file: math math.jsonl code code.jsonl"
            yield Problem(where, f"the file {shown(name, 300)} where a name is to be", wanted)
        elif not name.strip() or not name.isprintable():
            yield Problem(where, f"the name {name!a}", "one that can be read: gsm8k test.jsonl")


def _held_out(settings: Settings, registry: Registry) -> Iterator[Problem]:
    evaluation = settings.eval
    if evaluation.eval_config is not None and evaluation.eval_interval is None:
        eval_sets(
            settings, registry
        )  # nothing is evaluated; what is wrong with the file is told all the same
    source = evaluation.eval_data_source_path
    if evaluation.eval_interval is None or not (source is None or means(source, FILE_SOURCE)):
        return
    names, files = evaluation.eval_prompt_data[::2], evaluation.eval_prompt_data[1::2]
    yield from _unreadable_names("eval.eval_prompt_data", names)
    if len(set(names)) != len(names):
        yield Problem("eval.eval_prompt_data", f"the names {names}", "each name once: gsm8k test.jsonl")
    for spec in files:
        yield from _unreadable("eval.eval_prompt_data", spec)
    if evaluation.eval_config is None:
        return
    for name, one in eval_sets(settings, registry).items():
        if one.path not in files:
            yield from _unreadable(f"eval.eval_config ({evaluation.eval_config}): {name}.path", one.path)


def _checkpoint(settings: Settings) -> Iterator[Problem]:
    load = settings.checkpoint.load
    if load is None:
        return
    own = None if settings.run.overwrite else run_folder(settings) / "checkpoints"
    try:
        to_start_from(own, load=load)
    except CheckpointError:
        yield Problem(
            "checkpoint.load", f"{shown(load, 300)}, which holds no checkpoint", "the folder of a run"
        )


def _unreadable(where: str, spec: str) -> Iterator[Problem]:
    if problem := file_problem(spec):
        yield replace(problem, where=f"{where}: {problem.where}")
