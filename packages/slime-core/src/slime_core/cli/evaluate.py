"""`slime eval`: held-out accuracy of a model, or of a run's newest checkpoint."""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path

from slime_core.cli.arguments import read_checked, wants_help
from slime_core.config.derive import run_folder, with_trackers
from slime_core.config.settings import Settings
from slime_core.config.user_factories import naming
from slime_core.errors import ConfigError, Interrupted, Problem
from slime_core.plugins.registry import Registry
from slime_core.protocols import Metrics
from slime_core.run.run import Run
from slime_core.run.start import start
from slime_core.run.tracking import attach
from slime_core.runtime.closing import logged

HELP = """usage: slime eval RECIPE.toml ... [--load RUN_FOLDER] [--flag value ...]

Evaluates on the recipe's held-out prompts (those of its last stage): the weights of --load RUN_FOLDER's newest
checkpoint, or the model itself, for which --train-backend none does without a trainer. Prints the metrics as JSON.

Every evaluation has a folder of its own: OUTPUT_DIR/NAME-eval, or NAME-eval-2 and so on where that is there, with
metrics.jsonl, summary.json and every sample in rollouts/ (see `slime samples --help`). NAME is that of RUN_FOLDER, or
without --load the recipe's run_name; --overwrite writes NAME-eval anew."""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    registry = Registry.from_environment()
    [stage] = read_checked(argv, registry, only_last=True)
    settings = stage.beforehand
    if settings.eval.eval_interval is None:
        raise ConfigError([Problem("eval.eval_interval", "nothing", "an evaluation set and its interval")])
    of = settings.checkpoint.load or settings.model.hf_checkpoint
    settings = settings.having("run", "run_name", evaluation_name(settings), origin="slime eval")
    settings = with_trackers(settings, "jsonl", origin="slime eval")
    launch = registry.resolve("slime.launchers", settings.run.launcher)
    with naming(registry, "slime.launchers", settings.run.launcher, where="run.launcher"):
        found = launch(settings, registry, partial(_evaluate, of=of))
    print(json.dumps(found, indent=2))
    print(f"results in {run_folder(settings)}", file=sys.stderr)
    return 0


def evaluation_name(settings: Settings) -> str:
    """Return the name of an evaluation's folder: after the run whose weights it takes, else after the recipe's run.

    It is one that is not there yet, but for `overwrite`.
    """
    run, load = settings.run, settings.checkpoint.load
    root, name = Path(run.output_dir), run.run_name
    if load is not None:
        folder = Path(load).resolve()
        folder = folder.parent if folder.parent.name == "checkpoints" else folder  # one step's
        folder = folder.parent if folder.name == "checkpoints" else folder
        inside = folder != root.resolve() and folder.is_relative_to(root.resolve())
        name = str(folder.relative_to(root.resolve())) if inside else folder.name
    names = itertools.chain([f"{name}-eval"], (f"{name}-eval-{number}" for number in itertools.count(2)))
    return next(each for each in names if run.overwrite or not (root / each).exists())


async def _evaluate(run: Run, *, of: str) -> Metrics:
    """Evaluate once, and leave metrics and a summary as a training run does."""

    async def evaluate() -> Metrics:
        await start(run, trains=False)
        attach(run.registry, run.trackers)
        await run.send_weights(run.done_steps)
        metrics = await run.evaluate(run.done_steps)
        run.registry.hooks.slime_step_end(run=run, step=run.done_steps, metrics=metrics)
        return metrics

    outcome: dict[str, object] = {"status": "failed"}
    try:
        metrics = await run.stop.obey("the evaluation", evaluate())
        outcome = {"status": "completed", "accuracy": run.eval_after}
        return metrics
    except BaseException as error:
        status = "interrupted" if isinstance(error, Interrupted) else "failed"
        outcome = {"status": status, "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        with logged("summary.json was not written"):
            run.run_dir.write_json(
                run.run_dir.summary.name, run.summary(str(outcome["status"])) | outcome | {"evaluates": of}
            )
        await run.close()
