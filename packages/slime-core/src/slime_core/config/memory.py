"""Memory of a run before it starts: what its trainer and its engine predict, on which devices, and what would take less."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from slime_core.config.build import MemoryQuestion
from slime_core.config.derive import SYNC
from slime_core.config.factories import engine_factory, trainer_factory
from slime_core.plugins.own_name import means
from slime_core.protocols.memory import MemoryEstimate, Remedy

#: Most changes that are proposed together.
_MOST_CHANGES = 6


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """The most that is in use on devices of one kind."""

    where: str
    """Which devices, and what is on them then."""
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """What trainer and engine predict. Either may know nothing: then it is empty."""

    question: MemoryQuestion
    trainer: Sequence[MemoryEstimate]
    """Of the ranks of each pipeline stage."""
    engine: Sequence[MemoryEstimate]
    """Of the ranks of each engine."""

    @functools.cached_property
    def uses(self) -> list[DeviceUse]:
        """What is in use on each kind of device."""
        return [*(self._on_machine() if self.question.device.kind == "cpu" else self._on_gpus())]

    @property
    def highest(self) -> DeviceUse | None:
        """The fullest device; None where nothing is known."""
        return max(self.uses, key=lambda use: use.used_bytes, default=None)

    @property
    def missing_bytes(self) -> int:
        """What each kind of device lacks, all together; 0 where everything fits, or the devices' memory is not known."""
        memory = self.question.device.memory_bytes
        return 0 if memory is None else sum(max(0, use.used_bytes - memory) for use in self.uses)

    @property
    def fits(self) -> bool:
        """Whether nothing known says that it does not fit."""
        return self.missing_bytes == 0

    @property
    def is_certain(self) -> bool:
        """Whether it does not fit however short the samples are: of a prompt's and a response's one token."""
        shortest = replace(self.question, prompt_tokens=1, response_tokens=1)
        return not self.fits and not predict(shortest).fits

    def _on_machine(self) -> Iterator[DeviceUse]:
        """Yield the sum of all processes of a machine: a CPU has one memory. Of several machines each has as many ranks."""
        if not self.trainer and not self.engine:
            return
        cluster = self.question.settings.cluster
        training = generating = 0
        for each in self.trainer:
            resting = self._while_other_computes(each, offloads=cluster.offloads_train)
            training += each.ranks * (each.total + each.host_total) // cluster.actor_num_nodes
            generating += each.ranks * (resting + each.host_total) // cluster.actor_num_nodes
        for each in self.engine:
            resting = self._while_other_computes(each, offloads=cluster.offloads_rollout)
            training += each.ranks * (resting + each.host_total)
            generating += each.ranks * (each.total + each.host_total)
        where = "this machine: all ranks and engines"
        yield DeviceUse(where=where, used_bytes=max(training, generating))

    def _on_gpus(self) -> Iterator[DeviceUse]:
        cluster, first = self.question.settings.cluster, 0
        with_trainer: list[MemoryEstimate] = []
        for trainer in self.trainer:
            last = min(first + trainer.ranks, cluster.actor_num_nodes * cluster.actor_num_gpus_per_node)
            beside = [each for each in self.engine if _meet(each, first, last)]
            first += trainer.ranks
            with_trainer += beside
            if not beside:
                yield DeviceUse(where=trainer.who, used_bytes=trainer.total)
                continue
            engine = max(beside, key=lambda each: each.total)
            yield from self._in_turn(trainer, engine)
        for each in self.engine:
            if each not in with_trainer:
                yield DeviceUse(where=each.who, used_bytes=self._taken(each, beside=0))

    def _in_turn(self, trainer: MemoryEstimate, engine: MemoryEstimate) -> Iterator[DeviceUse]:
        """Yield what is on a GPU that both have, while either computes."""
        cluster = self.question.settings.cluster
        resting = self._while_other_computes(trainer, offloads=cluster.offloads_train)
        if cluster.offloads_train and not cluster.offloads_rollout:
            resting = trainer.updating  # weights stay where they are
        # The engine starts when the trainer waits, and before that has computed anything.
        taken = self._taken(engine, beside=min(resting, trainer.resting))
        waiting = engine.offloaded if cluster.offloads_rollout else taken
        if not cluster.offloads_rollout and engine.fills is None:
            waiting = self._while_other_computes(engine, offloads=False)
        where = f"the GPU of {trainer.who} and {engine.who}"
        yield DeviceUse(where=f"{where} while it trains", used_bytes=trainer.total + waiting)
        if cluster.offloads_train and cluster.offloads_rollout:
            both = trainer.updating + engine.updating
            yield DeviceUse(where=f"{where} while weights are updated", used_bytes=both)
        yield DeviceUse(where=f"{where} while it generates", used_bytes=resting + taken)

    def _while_other_computes(self, estimate: MemoryEstimate, *, offloads: bool) -> int:
        """Return what one of the two has while the other computes: in loops other than `sync` it may compute at the same time."""
        if offloads:
            return estimate.offloaded
        return estimate.resting if means(self.question.settings.run.loop, SYNC) else estimate.total

    def _taken(self, engine: MemoryEstimate, *, beside: int) -> int:
        """Return what an engine takes of a GPU on which so many bytes are in use when it starts."""
        memory = self.question.device.memory_bytes
        if engine.fills is None or memory is None:
            return engine.total
        # What is left free of the share must be there, too, for it to start.
        return max(int(engine.fills * (memory - beside)), int(engine.total / engine.fills))


def _meet(engine: MemoryEstimate, first: int, last: int) -> bool:
    """Return whether an engine has one of the GPUs `first` to `last` - 1 of the run's machine."""
    return max(engine.first_device, first) < min(engine.first_device + engine.ranks, last)


def predict(question: MemoryQuestion) -> MemoryPrediction:
    """Return what the chosen trainer and engine predict; imports both, and builds neither.

    Raises:
        PluginError: one is not installed.
    """
    settings, registry = question.settings, question.registry
    return MemoryPrediction(
        question=question,
        trainer=list(trainer_factory(settings.train, registry).memory(question)),
        engine=list(engine_factory(settings.rollout, registry).memory(question)),
    )


def remedies(prediction: MemoryPrediction, *, most: int = 3) -> list[tuple[Remedy, MemoryPrediction]]:
    """Return the cheapest changes of settings after which the run fits, and what is predicted then.

    Where too few are enough alone, the other answers are several of them, found one after another: always the one that saves most
    for what it costs. Where those are not enough either, what is left over is said. Empty where neither trainer nor engine knows
    of any.

    Args:
        prediction: of a run that does not fit.
        most: how many.
    """
    alone = [(remedy, _after(remedy, prediction)) for remedy in _known(prediction.question)]
    fitting = sorted((each for each in alone if each[1].fits), key=lambda each: _cost(each[0]))
    found = fitting[:most]
    left_out = {flag for remedy, _ in found for flag in remedy.flags}
    while len(found) < most:
        steps, after = _several(prediction, left_out)
        if not steps or (found and not after.fits):
            break
        found.append((functools.reduce(_joined, steps), after))
        left_out |= set(max(steps, key=_cost).flags)
    return found


def _known(question: MemoryQuestion) -> list[Remedy]:
    settings, registry = question.settings, question.registry
    return [
        *trainer_factory(settings.train, registry).remedies(question),
        *engine_factory(settings.rollout, registry).remedies(question),
    ]


def _several(
    prediction: MemoryPrediction, left_out: Collection[str]
) -> tuple[list[Remedy], MemoryPrediction]:
    """Return changes that together make a run fit, or save what can be saved, and what is predicted then.

    Args:
        prediction: of the run.
        left_out: flags of changes that are not to be among them.
    """
    steps: list[Remedy] = []
    while not prediction.fits and len(steps) < _MOST_CHANGES:
        known = [each for each in _known(prediction.question) if not set(left_out) & set(each.flags)]
        tried = [(remedy, _after(remedy, prediction)) for remedy in known]
        now = prediction.missing_bytes
        saving = [each for each in tried if each[1].missing_bytes < now]
        if not saving:
            break
        fitting = [each for each in saving if each[1].fits]
        if fitting:
            remedy, prediction = min(fitting, key=lambda each: _cost(each[0]))
        else:
            remedy, prediction = max(
                saving, key=lambda each: (now - each[1].missing_bytes) / _weighed(each[0])
            )
        steps.append(remedy)
    return steps, prediction


def _after(remedy: Remedy, prediction: MemoryPrediction) -> MemoryPrediction:
    question = prediction.question
    settings = question.settings
    for (table, field), value in remedy.settings.items():
        settings = settings.having(table, field, value, origin=remedy.text)
    return predict(replace(question, settings=settings))


def _joined(before: Remedy, after: Remedy) -> Remedy:
    """Return two changes as one, the second made after the first."""
    return Remedy(
        flags={**before.flags, **after.flags},
        settings={**before.settings, **after.settings},
        slower=before.slower + after.slower,
        wants=", ".join(dict.fromkeys(filter(None, (before.wants, after.wants)))),
    )


def _cost(remedy: Remedy) -> tuple[bool, float]:
    return bool(remedy.wants), remedy.slower


def _weighed(remedy: Remedy) -> float:
    """Return a cost to divide by: what needs more GPUs costs as much as five steps."""
    return remedy.slower + 0.02 + 5 * bool(remedy.wants)
