"""The kits: what first-party plugins keep, and what is said of things that break one promise."""

from __future__ import annotations

import ctypes
import dataclasses
import pickle

import numpy as np
import pytest
from slime_core.data.buffers import FifoBuffer
from slime_core.data.file_source import create_source
from slime_core.data.prompt_source import PromptSource
from slime_core.errors import ContractError
from slime_core.launch.local import launch
from slime_core.loops.sync import sync
from slime_core.null.engine import NoEngine
from slime_core.null.trainer import NoTrainer
from slime_core.plugins.registry import Registry
from slime_core.protocols import EngineCapabilities, EngineLoad, TrainerCapabilities
from slime_core.rewards.transforms import group_norm
from slime_core.rollout.filters import nonzero_std
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.rollouts.default import rollout
from slime_core.rollout.rollouts.sft import sft
from slime_core.run.build import make_build
from slime_core.samples import Sample, Status
from slime_core.testing import contracts, tabular
from slime_core.testing.contracts.runs import tabular_settings
from slime_core.trackers import console, jsonl, plot


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-core"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_core_keeps_its_promises(plugin):
    contracts.check_plugin(Registry(), plugin)


def test_what_needs_no_model_and_no_settings_of_its_own_is_tried_whole():
    registry = Registry()
    left_out = {
        (plugin.group, plugin.name): contracts.check_plugin(registry, plugin)
        for plugin in contracts.plugins_of("slime-core")
    }
    assert {plugin for plugin, why in left_out.items() if why is not None} == {
        ("slime.generators", "multi-turn"),
        ("slime.launchers", "local"),
        ("slime.rollouts", "recorded"),
        ("slime.rollouts", "sft"),
    }
    assert "n_samples_per_prompt: found 4; wanted 1" in left_out["slime.rollouts", "sft"]


def source(n=3):
    prompts = [Sample(prompt=letter, tokens=[i], label="x") for i, letter in enumerate("abc")]
    return PromptSource(prompts, n_samples_per_prompt=n, shuffle=True, seed=1)


def trainer():
    return tabular.TabularTrainer(estimator=tabular.credit, loss=tabular.reinforce, lr=1.0)


def test_engines_of_core_keep_their_promises():
    learnt = trainer()
    contracts.check_engine(tabular.TabularEngine, send=learnt.send)
    contracts.check_engine(NoEngine)


def test_trainers_of_core_keep_their_promises(tmp_path):
    contracts.check_trainer(trainer, tmp_path)
    contracts.check_trainer(NoTrainer, tmp_path)


def test_sources_buffers_and_tokenizers_of_core_keep_their_promises():
    contracts.check_source(source, n_samples_per_prompt=3)
    with tabular_settings(registry := Registry(), "--rollout-shuffle") as settings:
        build = make_build(settings, registry)
        contracts.check_source(lambda: create_source(build), n_samples_per_prompt=4)
    contracts.check_buffer(lambda: FifoBuffer(2))
    contracts.check_tokenizer(tabular.LetterTokenizer())


def test_generators_and_rollout_functions_of_core_keep_their_promises():
    contracts.check_generator(single_turn)
    contracts.check_rollout(rollout)
    contracts.check_rollout(sft, "--n-samples-per-prompt", "1")


def test_loops_and_launchers_of_core_keep_their_promises():
    contracts.check_loop(sync)
    contracts.check_launcher(launch)


@pytest.mark.parametrize("module", [console, jsonl, plot])
def test_trackers_of_core_keep_their_promises(module):
    contracts.check_tracker(module.create_tracker)


def test_scores_of_core_keep_their_promises():
    contracts.check_reward(tabular.next_letter)
    contracts.check_filter(nonzero_std)
    contracts.check_reward_transform(group_norm, options={"leave_one_out": True})
    contracts.check_reducer(tabular.per_token)


def test_the_error_of_a_kit_crosses_processes():
    error = pickle.loads(pickle.dumps(ContractError("engine X: found 1; wanted 2")))
    assert isinstance(error, AssertionError)
    assert str(error) == "engine X: found 1; wanted 2"


class Drawn(tabular.TabularEngine):
    """Heeds no seed."""

    n = 0

    async def generate(self, tokens, params, **kwargs):
        self.n += 1
        return await super().generate(tokens, dataclasses.replace(params, seed=self.n, temperature=1.0))


class Answers(tabular.TabularEngine):
    """Answers with something changed."""

    change = staticmethod(lambda answer: {})

    async def generate(self, tokens, params, **kwargs):
        answer = await super().generate(tokens, params)
        return dataclasses.replace(answer, **self.change(answer))


def answering(**changes):
    changed = {"change": staticmethod(lambda answer: {k: f(answer) for k, f in changes.items()})}
    return type("Answers", (Answers,), changed)


class Grows(tabular.TabularEngine):
    async def start(self):
        self.capabilities = EngineCapabilities(transports=("memory",), images=True)


class TakesNothing(tabular.TabularEngine):
    async def generate(self, tokens, params, **kwargs):
        return await super().generate(tokens or [1], params)


class ClosesOnce(tabular.TabularEngine):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed before")
        self.closed = True


class Loaded(tabular.TabularEngine):
    """Says something else of its load each time."""

    loads = ()

    async def current_load(self):
        *self.loads, newest = self.loads
        return newest


def saying(*loads):
    return type("Loaded", (Loaded,), {"loads": loads[::-1]})


class KeepsOld(tabular.TabularEngine):
    async def receive(self, plan):
        held = self.table.copy()
        await super().receive(plan)
        self.table = held
        return tabular.fingerprint(held + 1)


@pytest.mark.parametrize(
    ("create", "said"),
    [
        (object, "engine object: found no capabilities, start, generate"),
        (Grows, "engine Grows: start: found other capabilities than before; wanted the same"),
        (type("Bare", (tabular.TabularEngine,), {"capabilities": {}}), "capabilities of dict; wanted EngineCap"),
        (Drawn, "wanted the same tokens for the same seed, prompt and weights"),
        (answering(log_probs=lambda a: a.log_probs[1:]), "found 0 log_probs for 1; wanted one each"),
        (answering(log_probs=lambda a: [0.5] * len(a.tokens)), "wanted finite numbers of at most 0"),
        (answering(finish_reason=lambda a: "eos"), "found finish_reason 'eos'; wanted one of stop, length, abort"),
        (answering(weight_version=lambda a: 0), "found weight_version 0; wanted text"),
        (saying({"running": 0}, EngineLoad()), "engine Loaded: current_load: found dict; wanted an EngineLoad"),
        (saying(EngineLoad(kv_cache_usage=75.0), EngineLoad()), "kv_cache_usage 75.0; wanted a share from 0 to 1"),
        (saying(EngineLoad(), EngineLoad(queued=-1)), "queued -1; wanted a whole number of at least 0"),
        (saying(EngineLoad(running=2), EngineLoad()), "before the first request; wanted none running or queued"),
        (saying(EngineLoad(retractions=2), EngineLoad()), "found retractions that fall; wanted those since the start"),
        (TakesNothing, "engine TakesNothing: generate of no ids: found the answer"),
        (ClosesOnce, "engine ClosesOnce: close: found RuntimeError: closed before; wanted that it may be called twice"),
        (KeepsOld, "update to version 1: found fingerprints that are not those sent"),
    ],
)  # fmt: skip
def test_an_engine_that_breaks_a_promise_is_told(create, said):
    with pytest.raises(ContractError) as told:
        contracts.check_engine(create, send=trainer().send)
    assert said in str(told.value)


class Forgets(tabular.TabularTrainer):
    async def load(self, path):
        if not any(path.iterdir()):
            await super().load(path)


class TakesAny(tabular.TabularTrainer):
    async def load(self, path):
        if any(path.iterdir()):
            await super().load(path)


class Unnamed(tabular.TabularTrainer):
    async def train(self, batch):
        return {"loss": 1.0}


class Declares(tabular.TabularTrainer):
    capabilities = TrainerCapabilities(learns=False)


class Scribbles(tabular.TabularTrainer):
    async def train(self, batch):
        ctypes.memset(
            batch.rewards.ctypes.data, 1, 4
        )  # as tensors write, which do not know of read-only memory
        return await super().train(batch)


class Assigns(tabular.TabularTrainer):
    async def train(self, batch):
        batch.rewards[0] = 0
        return await super().train(batch)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Forgets, "trainer Forgets: load(saved): found"),
        (
            TakesAny,
            "trainer TakesAny: load of an empty folder: found the answer None; wanted CheckpointError",
        ),
        (
            Unnamed,
            "trainer Unnamed: train: found the metrics {'loss': 1.0}; wanted numbers named train/... or perf/...",
        ),
        (Declares, "trainer Declares: train, which it says it does not: found the answer"),
        (
            Scribbles,
            "trainer Scribbles: train: found a batch that it has written to; wanted copies of what is changed",
        ),
        (Assigns, "trainer Assigns: train: found ValueError: assignment destination is read-only"),
    ],
)
def test_a_trainer_that_breaks_a_promise_is_told(kind, said, tmp_path):
    with pytest.raises(ContractError) as told:
        contracts.check_trainer(
            lambda: kind(estimator=tabular.credit, loss=tabular.reinforce, lr=1.0), tmp_path
        )
    assert said in str(told.value)


class Loses(FifoBuffer):
    def state(self):
        return {"groups": []}


class Greedy(FifoBuffer):
    def take(self, n_groups):
        return super().take(n_groups + 1)


class Restless(PromptSource):
    def restore(self, state):
        """Stay."""


def restless():
    return Restless([Sample(prompt="a"), Sample(prompt="b")], n_samples_per_prompt=2)


class AddsBegin(tabular.LetterTokenizer):
    def encode(self, text):
        return [0, *super().encode(text)]


def told_generator(ctx, sample, params):
    """Not async."""


async def deaf(ctx, sample, params):
    """Call an abort the end."""
    answer = await ctx.engine.generate(sample.tokens, params)
    sample.append_response(answer.tokens, log_probs=answer.log_probs)
    sample.status = Status.COMPLETED
    return sample


async def one_group(run, step):
    return (await rollout(run, step))[:1]


async def lazy(run):
    await run.begin()


def twice(settings, registry, use):
    launch(settings, registry, use)


class Quiet:
    """Answers no hook."""


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: contracts.check_buffer(Loses), "buffer Loses: found 0 groups for 1 when restored; wanted 1"),
        (lambda: contracts.check_buffer(Greedy), "buffer Greedy: found 2 groups for 1 when put; wanted 1"),
        (lambda: contracts.check_source(source, n_samples_per_prompt=2), "found groups of [3] samples; wanted 2 each"),
        (lambda: contracts.check_source(restless, n_samples_per_prompt=2), "found other groups after restore(state)"),
        (lambda: contracts.check_tokenizer(AddsBegin()), "found the ids [0] of an empty text; wanted no special tokens"),
        (lambda: contracts.check_generator(told_generator), "is not async"),
        (lambda: contracts.check_generator(deaf), "found the status completed where the engine answered abort"),
        (lambda: contracts.check_rollout(one_group), "found 1 groups in step 1; wanted 2"),
        (lambda: contracts.check_loop(lazy), "found the steps [] ended; wanted [1, 2], each once"),
        (lambda: contracts.check_launcher(twice), "found None for the 2 that `use` returned"),
        (lambda: contracts.check_tracker(lambda build: Quiet()), "the tracker Quiet answers no hook"),
        (lambda: contracts.check_reward(lambda sample: "1"), "sample 0: returned str '1'; a reward returns"),
        (lambda: contracts.check_reward(lambda sample: float("nan")), "sample 0: returned nan; a reward"),
        (lambda: contracts.check_group_reward(lambda group: [1.0]), "returned 1 scores for a group of 3; return one each"),
        (lambda: contracts.check_filter(lambda group: False), "found False; wanted None to keep the group"),
        (lambda: contracts.check_filter(lambda group: group.pop() and None), "found a group that it changed"),
        (lambda: contracts.check_reward_transform(lambda r, g: r * np.nan), "found [nan"),
        (lambda: contracts.check_reward_transform(lambda r, g: list(r)), "found list"),
        (lambda: contracts.check_reducer(lambda view: view.loss_mask * 0 + 1), "of masked tokens; wanted 0"),
    ],
)  # fmt: skip
def test_what_breaks_a_promise_is_told(check, said):
    with pytest.raises(ContractError) as told:
        check()
    assert said in str(told.value)
