"""`slime replay RUN --step N`: trains a recorded step again, and compares its metrics with those that were recorded."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.cli.arguments import no_run
from slime_core.config.derive import with_trackers
from slime_core.config.load import load_settings
from slime_core.config.settings import Settings
from slime_core.errors import CheckpointError, ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rundir.checkpoint import checkpoints, to_start_from
from slime_core.rundir.rundir import RunDir

if TYPE_CHECKING:
    from slime_core.run.run import Run

#: What samples bring that records leave out: a run that trained by it cannot be replayed.
_UNRECORDED = (
    ("rollout", "rollout_top_p", 1.0), ("rollout", "rollout_top_k", -1), ("megatron", "use_rollout_routing_replay", False),
)  # fmt: skip
#: Metrics of the trainer that are no time.
_TRAINED = "train/"


def main(argv: list[str]) -> int:
    """Run the subcommand: exit status 1 if a metric differs."""
    arguments = _parse(argv)
    run = RunDir(arguments.run)
    if not os.path.isfile(run.config):
        raise ConfigError([no_run("slime replay", arguments.run, lacks="config.toml")])
    registry = Registry.from_environment()
    was = load_settings([str(run.config)], [], registry=registry)
    recorded = run.metrics_of_steps()
    if arguments.output is not None and os.path.lexists(arguments.output):
        raise ConfigError(
            [Problem("slime replay --output", arguments.output, "a folder that is not there yet")]
        )
    first, load = _start(run, was, arguments.step)
    _check(run, was, first, arguments.step, recorded)
    with tempfile.TemporaryDirectory(prefix="slime-replay-") as place:
        settings = _settings(was, run, arguments, load, folder=Path(arguments.output or place))
        trained = _train(settings, registry, last=arguments.step)
        differs = list(differences(recorded, trained, range(first, arguments.step + 1)))
        n = sum(_is_trained(name) for name in trained[arguments.step])
    where = "from the start" if load is None else f"from {load}"
    print(
        f"trained {'step' if first == arguments.step else f'steps {first} to'} {arguments.step} of {run.path} again, {where}"
    )
    for line in differs:
        print(line)
    if not differs:
        print(f"all {n} metrics train/... are the recorded ones, bit for bit")
    return 1 if differs else 0


def differences(
    recorded: Mapping[int, Mapping[str, Any]], trained: Mapping[int, Mapping[str, Any]], steps: Sequence[int]
) -> Iterator[str]:
    """Yield a line for each metric of the trainer that is another than it was, of the first step that has such."""
    for step in steps:
        names = [name for name in recorded[step] if _is_trained(name)]
        lines = [
            f"step {step}: {name} is {trained[step].get(name)!r}, and was {recorded[step][name]!r}"
            for name in names
            if not _same(trained[step].get(name), recorded[step][name])
        ]
        if lines:
            yield from lines
            return


def _is_trained(name: str) -> bool:
    return name.startswith(_TRAINED)


def _same(found: Any, wanted: Any) -> bool:
    return bool(found == wanted or (found != found and wanted != wanted))  # NaN is as it was, too


def _start(run: RunDir, was: Settings, step: int) -> tuple[int, Path | None]:
    """Return the first step that is trained, and the newest checkpoint before `step`; None from the model itself.

    Raises:
        CheckpointError: the run started from another's checkpoint, which is not to be found any more, and kept none of its own
            before the step.
    """
    before = [one for one in checkpoints(run.checkpoints) if one.step < step]
    if before:
        return before[-1].step + 1, before[-1].path
    found = to_start_from(None, load=was.checkpoint.load)
    if found is None:
        return 1, None
    first = next(iter(run.rollout_files()), found.step + 1)
    if found.step + 1 != first:  # the other run has gone on since
        raise CheckpointError(
            f"{found.path}: found step {found.step}; wanted that after which {run.path} began, {first - 1}"
        )
    return first, found.path


def _check(run: RunDir, was: Settings, first: int, last: int, recorded: Mapping[int, Any]) -> None:
    """Refuse what records do not hold.

    Raises:
        ConfigError: a step was not recorded, or was trained by what is not.
    """
    problems = [
        Problem(
            "slime replay --step",
            str(last),
            f"a step whose samples and metrics {_TRAINED}... are in {run.path}: {step} has none",
        )
        for step in range(min(first, last), last + 1)
        if not any(map(_is_trained, recorded.get(step, ()))) or not run.rollout_file(step).is_file()
    ]
    for table, key, neutral in _UNRECORDED:
        value = getattr(was.sections.get(table), key, neutral)
        if value != neutral:
            found = f"{table}.{key} {value}"
            problems.append(Problem("slime replay", found, f"{neutral}: records hold nothing of it"))
    if problems:
        raise ConfigError(problems[:1])


def _settings(
    was: Settings, run: RunDir, arguments: argparse.Namespace, load: Path | None, *, folder: Path
) -> Settings:
    """Return the settings of the run that trains again: its samples are read, nothing generates, and only the end is saved.

    The number of steps stays, as learning rates decay over it; `_until` ends the run.
    """
    samples = str(run.rollout_file(1)).replace("step_000001", "step_{step:06d}")
    changes = {
        ("rollout", "rollout_function_path"): "recorded",
        ("rollout", "rollout_function_args"): {"samples": samples},
        ("rollout", "rollout_engine"): "none",
        ("cluster", "colocate"): False,
        ("cluster", "offload_rollout"): None,
        ("run", "run_name"): "replay" if arguments.output is None else Path(arguments.output).name,
        ("run", "output_dir"): str(folder if arguments.output is None else folder.parent),
        ("run", "loop"): "sync",
        ("run", "overwrite"): False,
        ("checkpoint", "save_interval"): None,
        ("checkpoint", "save_last"): arguments.output is not None,
        ("checkpoint", "save_hf"): None,
        ("checkpoint", "async_save"): False,
        ("eval", "eval_interval"): None,
        ("train", "update_weights_interval"): 1,
    }
    if load is not None:
        changes["checkpoint", "load"] = str(load)
    for (table, key), value in changes.items():
        was = was.having(table, key, value, origin="slime replay")
    return with_trackers(was, "jsonl", origin="slime replay")


def _train(settings: Settings, registry: Registry, *, last: int) -> dict[int, dict[str, Any]]:
    """Train up to the step `last`, and return the metrics of each step."""
    from slime_core.config.derive import run_folder

    registry.resolve("slime.launchers", settings.run.launcher)(settings, registry, partial(_until, last=last))
    return RunDir(run_folder(settings)).metrics_of_steps()


async def _until(run: Run, *, last: int) -> dict[str, Any]:
    """Drive an assembled run as if `last` were its last step; its trainer keeps the schedule of all that it was to have."""
    from slime_core.launch.local import drive

    run.num_steps = last
    return await drive(run)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slime replay",
        allow_abbrev=False,
        description="Train a recorded step again on its samples, from the newest checkpoint before it or else from the start, and "
        "compare the trainer's metrics with the recorded ones, bit for bit. Nothing is generated. Exit status 1 if one differs.",
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--step", type=_count, required=True, metavar="N", help="the step")
    parser.add_argument("--output", metavar="FOLDER", help="keep what is trained as a run of its own, with a checkpoint; without it "
                        "nothing is kept")  # fmt: skip
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a step, 1 or more")
    return int(text)
