"""`slime train`: run a recipe, or go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.cli.arguments import read_stages, wants_help
from slime_core.config.check import check_stages
from slime_core.config.sections import RunSection, TrainSection
from slime_core.errors import ConfigError, Problem
from slime_core.launchers.local import drive
from slime_core.no_trainer import NAMES
from slime_core.plugins.registry import Registry
from slime_core.stages import train_stages

HELP = """usage: slime train RECIPE.toml [RECIPE.toml ...] [--flag value ...] [--set section.key=value ...]

Trains a model. Recipes are TOML files, later ones override earlier ones, flags override recipes.
Everything about the run lands in OUTPUT_DIR/RUN_NAME. The same command again resumes from its newest
checkpoint; --overwrite starts anew. The stages of a recipe, [stage.NAME], run one after the other, each
from the weights of the one before; --set stage.NAME.section.key=value sets a value of one of them.

  slime train recipes/quickstart.toml
  slime train recipes/quickstart.toml --num-rollout 20 --run-name short
  slime config flags              every flag, with its default
  slime check RECIPE.toml         find mistakes without starting anything"""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    registry = Registry.from_environment()
    stages = read_stages(argv, registry)
    problems = check_stages(stages, registry)
    if any(stage.settings.section(TrainSection).train_backend in NAMES for stage in stages):
        problems.append(Problem("train.train_backend", "none", "a trainer", "slime eval does without one"))
    if problems:
        raise ConfigError(problems)
    if stages[0].name:
        summary = train_stages(stages, registry)
    else:
        settings = stages[0].settings
        summary = registry.resolve("slime.launchers", settings.section(RunSection).launcher)(
            settings, registry, drive
        )
    report(summary, stages[-1].folder)
    return 0


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
