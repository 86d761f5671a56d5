"""`slime train`: run a recipe, or go on with it."""

from __future__ import annotations

from typing import Any

from slime_core.cli.arguments import read_settings, wants_help
from slime_core.config.check import check_settings
from slime_core.config.sections import RunSection
from slime_core.errors import ConfigError
from slime_core.launchers.local import drive
from slime_core.plugins.registry import Registry

HELP = """usage: slime train RECIPE.toml [RECIPE.toml ...] [--flag value ...] [--set section.key=value ...]

Trains a model. Recipes are TOML files, later ones override earlier ones, flags override recipes.
Everything about the run lands in OUTPUT_DIR/RUN_NAME. The same command again resumes from its newest
checkpoint; --overwrite starts anew.

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
    settings = read_settings(argv, registry)
    problems = check_settings(settings, registry)
    if problems:
        raise ConfigError(problems)
    launch = registry.resolve("slime.launchers", settings.section(RunSection).launcher)
    report(launch(settings, registry, drive), settings.section(RunSection))
    return 0


def report(summary: dict[str, Any], run: RunSection) -> None:
    """Print how the run ended."""
    before, after = summary.get("eval_before"), summary.get("eval_after")
    print(f"\n{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.0f} s")
    if before is not None and after is not None:
        print(f"held-out accuracy: {before:.3f} before, {after:.3f} after ({after - before:+.3f})")
    elif after is not None:
        print(f"held-out accuracy: {after:.3f}")
    print(
        f"results in {run.output_dir}/{run.run_name}: metrics.jsonl, summary.json, reward.png, rollouts/, checkpoints/"
    )
