"""`slime eval`: held-out accuracy of a model, or of a run's newest checkpoint."""

from __future__ import annotations

import asyncio
import json

from slime_core.assemble import assemble, start
from slime_core.cli.arguments import read_settings, wants_help
from slime_core.config.sections import EvalSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.protocols import Metrics

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
    print(json.dumps(asyncio.run(_evaluate(settings, registry)), indent=2))
    return 0


async def _evaluate(settings: Settings, registry: Registry) -> Metrics:
    run = await assemble(settings, registry)
    try:
        await start(run)
        await run.sync_weights(run.start_step)
        return await run.evaluate(run.start_step)
    finally:
        await run.close()
