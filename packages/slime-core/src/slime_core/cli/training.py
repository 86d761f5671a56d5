"""The work of `slime train`, imported after its first line is printed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.cli.arguments import read_checked
from slime_core.config.derive import batch_sizes
from slime_core.config.stages import Stage
from slime_core.config.user_factories import naming
from slime_core.plugins.registry import Registry
from slime_core.rundir.claim import changes
from slime_core.rundir.rundir import RunDir
from slime_core.runtime.progress import telling


def train(argv: Sequence[str]) -> int:
    """Check the runs of recipes and flags, train those that are not complete, and report how they ended.

    Raises:
        SlimeError: something is wrong with them, or one failed.
    """
    registry = Registry.from_environment()
    stages = read_checked(argv, registry, to_train=True)
    for stage in stages:
        print(_plan(stage), flush=True)
    if _nothing_to_do(stages):
        return 0
    with telling():
        summary = _trained(stages, registry)
    report(summary, stages[-1].folder)
    return 0


def _trained(stages: Sequence[Stage], registry: Registry) -> dict[str, Any]:
    """Train, and return the summary."""
    from slime_core.launch.local import drive  # imports numpy, and what assembles a run
    from slime_core.launch.stages import train_stages

    if stages[0].name:
        return train_stages(stages, registry)
    settings = stages[0].settings
    launch = registry.resolve("slime.launchers", settings.run.launcher)
    with naming(registry, "slime.launchers", settings.run.launcher, where="run.launcher"):
        summary: dict[str, Any] = launch(settings, registry, drive)
    return summary


def _plan(stage: Stage) -> str:
    """Say what a run is about to do."""
    settings = stage.settings
    run, rollout, sizes = (
        settings.run,
        settings.rollout,
        batch_sizes(settings),
    )
    length = (
        f"{run.num_rollout} steps" if run.num_rollout is not None else f"{run.num_epoch} passes over the data"
    )
    return (
        f"run {stage.folder}: {length} of {sizes.rollout_batch_size} prompts x {sizes.n_samples_per_prompt} samples; "
        f"model {settings.model.hf_checkpoint}, trainer {settings.train.train_backend}, "
        f"engine {rollout.rollout_engine}"
    )


def _nothing_to_do(stages: Sequence[Stage]) -> bool:
    """Say whether all runs took all of their steps before, and if so print what can be done now."""
    ended = [_completed(stage) for stage in stages]
    if not all(ended) or (stages[0].name and not RunDir(stages[0].folder.parent).summary.exists()):
        return False
    for stage, summary in zip(stages, ended, strict=True):
        if changed := ", ".join(changes(RunDir(stage.folder), stage.settings)):
            print(
                f"warning: {stage.folder} was completed before, with other settings: {changed}; nothing is trained; "
                "--overwrite starts anew",
                file=sys.stderr,
            )
        named = f"stage {stage.name}: " if stage.name else ""
        n_steps = stage.settings.run.num_rollout or summary["steps"]
        done = f"{named}nothing to do: completed {summary['steps']} of {n_steps} steps"
        print("; ".join([done, *_accuracy(summary)]))
    folder, steps = stages[-1].folder, ended[-1]["steps"]
    look = " or ".join([f"slime samples {folder}", *map(str, folder.glob("reward.png"))])
    print(f"to go on: --num-rollout {2 * steps}; anew: --overwrite; look: {look}")
    return True


def _completed(stage: Stage) -> dict[str, Any]:
    """Return the summary of a run that took all of its steps in an earlier process; empty where it did not.

    How many they are is read off the settings. Where only the data says it, the run must have the settings that it had.
    """
    run = stage.settings.run
    if run.overwrite or not (stage.leaves is None or stage.leaves.is_dir()):
        return {}
    folder = RunDir(stage.folder)
    summary = folder.read_summary()
    if summary.get("status") != "completed":
        return {}
    if run.num_rollout is None:
        return {} if changes(folder, stage.settings) else summary
    return summary if summary["steps"] >= run.num_rollout else {}


def report(summary: dict[str, Any], folder: Path) -> None:
    """Print how the run ended, and each of its stages."""
    each: dict[str, dict[str, Any]] = summary.get("stages", {})
    print()
    for name, stage in each.items():
        print("; ".join([f"stage {name}: {_ended(stage)}", *_accuracy(stage)]))
    print(_ended(summary), *_accuracy(summary), sep="\n")
    folders = [folder.parent / name for name in each] or [folder]
    print(f"results in {' and '.join(map(str, folders))}: {', '.join(_left_in(folders))}")


def _left_in(folders: Sequence[Path]) -> list[str]:
    """Return which of a run's results are there."""
    files = [name for name in ("metrics.jsonl", "summary.json", "reward.png") if _any(folders, name)]
    return files + [f"{name}/" for name in ("rollouts", "checkpoints") if _any(folders, f"{name}/*")]


def _any(folders: Sequence[Path], pattern: str) -> bool:
    return any(any(folder.glob(pattern)) for folder in folders)


def _ended(summary: Mapping[str, Any]) -> str:
    return f"{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.0f} s"


def _accuracy(summary: Mapping[str, Any]) -> list[str]:
    """Return what there is to say about held-out prompts: a line, or none."""
    before, after = summary.get("eval_before"), summary.get("eval_after")
    if after is None:
        return []
    if before is None:
        return [f"held-out accuracy: {after:.3f}"]
    return [f"held-out accuracy: {before:.3f} before, {after:.3f} after ({after - before:+.3f})"]
