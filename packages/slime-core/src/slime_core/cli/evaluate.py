"""`slime eval`: held-out accuracy of a model, or of a run's newest checkpoint."""

from __future__ import annotations

import json

from slime_core.cli.arguments import read_checked, wants_help
from slime_core.config.sections import EvalSection, RunSection
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.protocols import Metrics
from slime_core.run import Run
from slime_core.start import start

HELP = """usage: slime eval RECIPE.toml ... [--flag value ...]

Evaluates on the recipe's held-out prompts (those of its last stage): the weights of --load RUN_FOLDER's newest
checkpoint, or the model itself, for which --train-backend none does without a trainer. Writes to
OUTPUT_DIR/RUN_NAME-eval and prints the metrics as JSON."""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    registry = Registry.from_environment()
    settings = read_checked(argv, registry)[-1].beforehand
    if settings.section(EvalSection).eval_interval is None:
        raise ConfigError([Problem("eval.eval_interval", "nothing", "an evaluation set and its interval")])
    own = {
        "run_name": f"{settings.section(RunSection).run_name}-eval",
        "overwrite": True,
        "tracker": ["jsonl"],
    }
    for key, value in own.items():
        settings = settings.having("run", key, value, origin="slime eval")
    launch = registry.resolve("slime.launchers", settings.section(RunSection).launcher)
    print(json.dumps(launch(settings, registry, _evaluate), indent=2))
    return 0


async def _evaluate(run: Run) -> Metrics:
    async def evaluate() -> Metrics:
        await start(run)
        await run.sync_weights(run.done_steps)
        return await run.evaluate(run.done_steps)

    try:
        return await run.stop.obey("the evaluation", evaluate())
    finally:
        await run.close()
