"""Kits of what works on a run: generators, rollout functions, loops, launchers and trackers, on a policy that is a table."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.config.settings import Settings
from slime_core.errors import PluginError, TrainerError
from slime_core.launch.local import launch as launch_local
from slime_core.loops.sync import sync
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.protocols import Completion, GenerateContext, SamplingParams
from slime_core.rollout.execution import Generator
from slime_core.run.build import make_build
from slime_core.run.run import Run
from slime_core.run.start import start
from slime_core.run.tracking import attach
from slime_core.samples import Group, Sample, Status
from slime_core.testing import tabular
from slime_core.testing.contracts.promises import answering, name_of, require, run_within

_TABULAR = "slime_core.testing.tabular"
_PARTS = {
    "tokenizer": "load_tokenizer", "rollout-engine": "create_engine", "train-backend": "create_trainer",
    "advantage-estimator": "credit", "loss-type": "reinforce", "loss-reducer": "per_token", "rm-type": "next_letter",
}  # fmt: skip
_SIZES = {
    "rollout-batch-size": "2", "n-samples-per-prompt": "4", "rollout-max-response-len": "3", "num-rollout": "2",
    "tracker": "jsonl", "eval-interval": "none", "label-key": "label", "lr": "1.0",
}  # fmt: skip


@contextmanager
def tabular_settings(registry: Registry, *flags: str) -> Iterator[Settings]:
    """Yield the settings of a run of two steps over a table of letters, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="slime-contract-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        rows = "".join(f'{{"input": "{letter}", "label": "{letter}"}}\n' for letter in "abcdefgh")
        (folder / "letters.jsonl").write_text(rows, encoding="utf-8")
        files = {"hf-checkpoint": "model", "prompt-data": "letters.jsonl", "output-dir": "runs"}
        given = {key: str(folder / path) for key, path in files.items()} | _SIZES
        given |= {key: f"{_TABULAR}:{value}" for key, value in _PARTS.items()}
        words = [word for key, value in given.items() for word in (f"--{key}", value)]
        yield load_settings([], [*words, *flags], registry=registry)


def check_generator(
    generate: Callable[..., Awaitable[Sample | list[Sample]]],
    *,
    sample: Sample | None = None,
    context: GenerateContext | None = None,
) -> None:
    """Check a generator: it returns its sample, or several of one execution, as training needs them, and heeds an abort.

    Args:
        generate: the generator.
        sample: a pending one with prompt ids, two letters when not given.
        context: its engine and tokenizer, a table of letters when not given.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"generator {name_of(generate)}"
    context = context or GenerateContext(engine=tabular.TabularEngine(), tokenizer=tabular.LetterTokenizer())
    given = sample or Sample(index=0, group_index=0, prompt="ab", tokens=[0, 1], label="c")
    params = SamplingParams(max_new_tokens=6, seed=5)
    runner = Generator(name=name_of(generate), function=generate, vocab_size=None, max_context_len=None)
    fresh = [dataclasses.replace(given, metadata=dict(given.metadata)) for _ in range(2)]
    with answering(where, "a finished sample"):
        finished = run_within(where, runner.execute(context, fresh[0], params))
        runner.check_numbers(finished)
        for one in finished:
            told = one.status in (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)
            require(told, where, found=f"the status {one.status}", wanted="completed, truncated or failed")
        engine = _Aborted()
        aborted = run_within(
            where, runner.execute(dataclasses.replace(context, engine=engine), fresh[1], params)
        )
    heeded = not engine.asked or any(one.status is Status.ABORTED for one in aborted)
    found = f"the status {aborted[0].status} where the engine answered abort"
    require(heeded, where, found=found, wanted="aborted, with what was generated")


class _Aborted:
    """An engine that answers every request with `abort`."""

    def __init__(self) -> None:
        self.asked = 0

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        self.asked += 1
        return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version="0")


def check_rollout(rollout: Callable[[Run, int], Awaitable[list[Group]]], *flags: str) -> None:
    """Check a rollout function: as many groups as a step takes, finished and scored, that make a batch, step after step.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"rollout function {name_of(rollout)}"

    async def use(run: Run) -> None:
        run.rollout_fn = rollout  # type: ignore[assignment]  # `Run` is what a rollout function sees of it, and more
        try:
            await start(run)
            await run.begin()
            for step in run.steps:
                groups = await run.rollout(step)
                n, target = len(groups), run.sizes.rollout_batch_size
                require(n == target, where, found=f"{n} groups in step {step}", wanted=f"{target}")
                await run.train(run.batch(step, groups))
                await run.end_step(step)
        finally:
            await run.close()

    registry = Registry()
    with tabular_settings(registry, *flags) as settings, answering(where, "groups to train on"):
        launch_local(settings, registry, use)


class _Told:
    """A tracker that remembers which steps ended."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)


def check_loop(loop: Callable[[Run], Awaitable[None]], *flags: str) -> None:
    """Check a loop: it takes a run from its first step to its last, and ends each once, in order.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"loop {name_of(loop)}"

    async def use(run: Run) -> None:
        told = _Told()
        try:
            await start(run)
            attach(run.registry, [told])
            await loop(run)
            await run.finish()
        finally:
            run.trackers = [*run.trackers, told]
            await run.close()
        found, wanted = [step for step in told.steps if step], list(range(1, run.num_steps + 1))
        require(found == wanted, where, found=f"the steps {found} ended", wanted=f"{wanted}, each once")
        done = run.done_steps
        require(done == run.num_steps, where, found=f"{done} steps done", wanted=f"{run.num_steps}")

    registry = Registry()
    with tabular_settings(registry, *flags) as settings, answering(where, "a run driven to its end"):
        launch_local(settings, registry, use)


def check_launcher(launch: Callable[..., Any], *flags: str) -> None:
    """Check a launcher: `use` is called once with a run that can be driven; what it returns or raises comes back.

    Raises:
        ContractError: says which promise is broken.
    """
    where, calls = f"launcher {name_of(launch)}", []

    async def drive(run: Run) -> int:
        calls.append(run)
        try:
            await start(run)
            await sync(run)
        finally:
            await run.close()
        return run.done_steps

    async def fail(run: Run) -> None:
        await run.close()
        raise TrainerError("on purpose")

    registry = Registry()
    with tabular_settings(registry, *flags) as settings, answering(where, "a run that can be driven"):
        answer = launch(settings, registry, drive)
        require(
            answer == 2, where, found=f"{answer!r} for the 2 that `use` returned", wanted="what it returns"
        )
        require(len(calls) == 1, where, found=f"{len(calls)} calls of `use`", wanted="one")
    with tabular_settings(registry, *flags) as settings:
        try:
            launch(settings, registry, fail)
        except TrainerError:
            return
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            require(False, where, found=found, wanted="the TrainerError that `use` raised")
        require(False, where, found="no error", wanted="the TrainerError that `use` raised")


def check_tracker(create: Callable[[BuildContext], Any], *flags: str, drives: bool = True) -> None:
    """Check a tracker: it is built, its methods answer hooks that there are, and a whole run tells it what happens.

    Args:
        create: the factory.
        flags: settings of its own.
        drives: whether a run is made; without one the tracker is built, and its hooks are looked at.

    Raises:
        ContractError: says which promise is broken.
    """
    where, registry = f"tracker {name_of(create)}", Registry()

    def attached(build: BuildContext) -> Any:
        with answering(where, "an object whose methods answer hooks"):
            tracker = create(build)
        try:
            attach(registry, [tracker])
        except PluginError as error:
            require(False, where, found=str(error), wanted="methods that are hooks, marked @hookimpl")
        answered = registry.hook_manager.get_hookcallers(tracker)
        require(bool(answered), where, found="no method that answers a hook", wanted="one at least")
        return tracker

    async def use(run: Run) -> None:
        run.trackers = [attached(make_build(run.settings, registry))]
        try:
            await start(run)
            hooks = registry.hooks
            hooks.slime_run_start(run=run)
            await sync(run)
            hooks.slime_run_end(run=run, summary=run.summary("completed"))
        finally:
            await run.close()

    with tabular_settings(registry, *flags) as settings, answering(where, "an answer to every hook"):
        if drives:
            launch_local(settings, registry, use)
        else:
            attached(make_build(settings, registry))
