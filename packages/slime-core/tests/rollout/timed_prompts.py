"""A dispatcher's surroundings in virtual time: an engine whose answers take seconds, prompts without end, and steps of training."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

from slime_core.config.sections import RewardSection, RolloutSection
from slime_core.config.settings import Settings
from slime_core.protocols import Completion, EngineCapabilities
from slime_core.rollout.concurrency import ConcurrencyLimit
from slime_core.rollout.dispatcher import Dispatcher
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import leftovers, training_params
from slime_core.rollout.user_hooks import RolloutHooks
from slime_core.rundir.events import EventLog
from slime_core.samples import Sample
from slime_core.testing.tabular import LetterTokenizer

BATCH = 4


class TimedEngine:
    """Answers with one token a second, for as many seconds as the seed says; an abort ends it at the tokens so far."""

    capabilities = EngineCapabilities()

    def __init__(self, seconds):
        self.seconds, self.version, self.aborting = seconds, 0, asyncio.Event()

    async def generate(self, tokens, params, *, session_id=None):
        n = min(params.max_new_tokens, self.seconds(params.seed) - (len(tokens) - 1))
        version, loop = str(self.version), asyncio.get_running_loop()
        begin, reason = loop.time(), "stop"
        try:
            async with asyncio.timeout(n):
                await self.aborting.wait()
            n, reason = int(loop.time() - begin), "abort"
        except TimeoutError:
            pass
        return Completion(tokens=[1] * n, log_probs=[-1.0] * n, finish_reason=reason, weight_version=version)

    async def abort(self):
        self.aborting.set()
        self.aborting = asyncio.Event()


class Prompts:
    """What a run gives to its dispatcher: prompts without end, and a filter."""

    def __init__(self, seconds, *, drops=lambda index: False, section=None):
        self.engine, self.tokenizer, self.scorer = TimedEngine(seconds), LetterTokenizer(), None
        self.generate, self.vocab_size, self.engine_context_len = single_turn, None, None
        self.sizes = SimpleNamespace(rollout_batch_size=BATCH, over_sampling_batch_size=BATCH)
        self.rollout = RolloutSection(
            rollout_batch_size=BATCH,
            rollout_max_response_len=10000,
            n_samples_per_prompt=1,
            **(section or {}),
        )
        self.settings = Settings({"rollout": self.rollout, "reward": RewardSection()}, {}, {})
        self.events, self.user_hooks, self.generating_step = EventLog(), RolloutHooks(), 1
        self.services: dict[str, object] = {}
        self.concurrency = ConcurrencyLimit(self.rollout.rollout_concurrency, self.engine, self.events)
        self.taken, self.buffer, self.dropped, self.drops = 0, [], [], drops

    def take(self, n):
        groups, self.buffer = self.buffer[:n], self.buffer[n:]
        while len(groups) < n:
            groups.append([Sample(index=self.taken, group_index=self.taken, tokens=[0])])
            self.taken += 1
        return groups

    def drop_reason(self, group):
        return "chosen" if self.drops(group[0].index) else None

    def keep_for_later(self, groups, *, given):
        self.buffer += leftovers(groups, self.rollout, given=given, step=1)

    def sampling_params(self, sample):
        return training_params(sample, self.rollout)

    def record_drop(self, group, reason):
        self.dropped.append(group[0].index)

    def report(self, phase, done, total):
        pass


def lengths(seed):
    """Return a heavy-tailed number of seconds for each seed, most below 20 and some above 200."""
    return 1 + min(400, int(random.Random(seed).lognormvariate(2, 1.3)))


async def drive(prompts, admission, *, steps, train_s=5, mode=None):
    """Train on `steps` batches; returns them, and the ages of their samples."""
    dispatcher = Dispatcher(prompts, last_step=steps)
    dispatcher.admission = admission
    batches, ages = [], []
    async with dispatcher.open():
        dispatcher.weights_arrived(0)
        for step in range(1, steps + 1):
            groups = await dispatcher.next(step)
            batches.append([group[0].index for group in groups])
            ages += [step - 1 - int(group[0].weight_versions[0]) for group in groups]
            await asyncio.sleep(train_s)
            prompts.engine.version = step
            if mode == "continue":
                async with dispatcher.interrupted():
                    await asyncio.sleep(1)
            dispatcher.weights_arrived(step)
    return batches, ages, dispatcher


def accounted(prompts, batches, dispatcher):
    """Return how often each prompt that was taken was trained on, dropped, or is still there."""
    held = [job.group[0].index for job in [*dispatcher.jobs.kept, *dispatcher.jobs.undecided]]
    found = Counter(index for batch in batches for index in batch)
    return found + Counter(prompts.dropped) + Counter(held) + Counter(g[0].index for g in prompts.buffer)
