"""`slime eval`: held-out accuracy of a model, or of a run's newest checkpoint."""

from __future__ import annotations

import json

from slime_core.assemble import start
from slime_core.cli.arguments import read_settings, wants_help
from slime_core.config.sections import EvalSection, RunSection
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.protocols import Metrics
from slime_core.run import Run

HELP = """usage: slime eval RECIPE.toml ... [--flag value ...]

Evaluates on the recipe's held-out prompts: the weights of --load RUN_FOLDER's newest checkpoint, or the
model itself. Writes to OUTPUT_DIR/RUN_NAME-eval and prints the metrics as JSON."""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    registry = Registry.from_environment()
    settings = read_settings(argv, registry)
    if settings.section(EvalSection).eval_interval is None:
        raise ConfigError([Problem("eval.eval_interval", "nothing", "an evaluation set and its interval")])
    name = f"{settings.sections['run'].run_name}-eval"  # type: ignore[attr-defined]  # the table is RunSection
    settings = read_settings([*argv, "--run-name", name, "--overwrite", "--tracker", "jsonl"], registry)
    launch = registry.resolve("slime.launchers", settings.section(RunSection).launcher)
    print(json.dumps(launch(settings, registry, _evaluate), indent=2))
    return 0


async def _evaluate(run: Run) -> Metrics:
    try:
        await start(run)
        await run.sync_weights(run.start_step)
        return await run.evaluate(run.start_step)
    finally:
        await run.close()
