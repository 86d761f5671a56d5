"""Admission: when prompts are taken, how many, and which finished groups a step trains on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from slime_core.samples import Group


@dataclass(eq=False, kw_only=True)
class Job:
    """A group on its way from the prompt to the batch of a step."""

    number: int
    """Its place in the order of submission."""
    version: int
    """Weights that its oldest token may come from: the bound on staleness counts from it."""
    given: Group
    """The group as it was submitted: what a checkpoint holds until it is finished."""
    group: Group
    """The group itself, finished and scored once it is kept."""
    is_finished: bool = False
    """Whether all its samples are generated and scored, and the dispatcher was told so."""

    @property
    def prompt(self) -> int:
        """Its place in the order of prompts."""
        return self.group[0].index or 0


@dataclass(kw_only=True)
class Jobs:
    """Where all groups are that were taken and not trained on."""

    batch_size: int
    """Groups that a step trains on."""
    last_step: int
    """Last step of the run."""
    next_step: int = 1
    """The step that gets the next batch."""
    version: int = 0
    """Weights of the engine: the step after which they were sent."""
    kept: list[Job] = field(default_factory=list)
    """Finished, and kept by the filter, in the order of decisions."""
    undecided: set[Job] = field(default_factory=set)
    """In flight, or waiting to be submitted again."""
    handed_over: list[Job] = field(default_factory=list)
    """Returned as a step's batch to somebody who does not have it yet (see `Dispatcher.arrived`)."""

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.kept) + len(self.undecided)

    def age(self, job: Job) -> int:
        """Return how many steps lie between a group's oldest weights and those that the next step trains."""
        return self.next_step - 1 - job.version


class Admission(Protocol):
    """When groups are admitted, and in which order they are used."""

    @property
    def carries(self) -> bool:
        """Whether groups stay in flight from one step to the next; others are aborted once a batch is full."""

    @property
    def max_staleness(self) -> int | None:
        """Most steps between the weights of a sample's oldest token and those that train on it; None: any."""

    @property
    def in_completion_order(self) -> bool:
        """Whether groups are used as they finish, instead of in the order of prompts or of submission."""

    def wanted(self, jobs: Jobs) -> int:
        """Return how many groups to submit now."""

    def accepts(self, version: int, jobs: Jobs) -> bool:
        """Say whether a group with tokens of weights `version` may go on from them; others begin anew."""

    def expired(self, jobs: Jobs) -> list[Job]:
        """Return kept groups that are too old for the next step, to be dropped."""

    def batch(self, jobs: Jobs) -> list[Job] | None:
        """Return the groups of the next step; None while they are not complete."""


@dataclass(frozen=True, kw_only=True)
class Waves:
    """Each step takes waves of prompts until its batch is full, and aborts what is then in flight.

    The next wave begins when all groups are decided on, in the order of their prompts, so that the same run always trains
    on the same samples. In order of completion the first to finish are kept, and a wave begins as soon as it is sure to be
    needed, which is faster and is not reproducible.
    """

    wave: int
    """Prompts of a wave."""
    in_completion_order: bool = False
    max_staleness: int | None = None
    """How old the tokens of a partial response may be, in steps; None: however old."""
    carries: bool = field(default=False, init=False)

    def wanted(self, jobs: Jobs) -> int:
        """Return a wave's prompts, if one is to begin."""
        is_short = self.in_completion_order and len(jobs) < jobs.batch_size
        begins = len(jobs.kept) < jobs.batch_size and (not jobs.undecided or is_short)
        return self.wave if begins else 0

    def accepts(self, version: int, jobs: Jobs) -> bool:
        """Say whether tokens of these weights are young enough for the next step."""
        return self.max_staleness is None or jobs.next_step - 1 - version <= self.max_staleness

    def expired(self, jobs: Jobs) -> list[Job]:
        """Return none: a batch is trained on as it is full."""
        return []

    def batch(self, jobs: Jobs) -> list[Job] | None:
        """Return the groups that were kept first."""
        return jobs.kept[: jobs.batch_size] if len(jobs.kept) >= jobs.batch_size else None


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """Groups are in flight all the time, and none is trained on more than `max_staleness` steps after its submission.

    Step s trains the weights of version s - 1. Under version v a group is submitted only if it is among the first
    (v + 1 + max_staleness) x batch_size of the run that the filter did not drop; so all submitted under v have their place
    in a step up to v + 1 + max_staleness, and the bound holds for each sample without discarding any. Source of the rule:
    AReaL (arXiv 2505.24298), section 5.1, where interrupted and filtered samples are not counted apart.
    """

    max_staleness: int
    """Most steps between the weights that generated a group's oldest token and those that train on it; at least 0."""
    in_completion_order: bool = False
    drops: bool = False
    """Admit another batch beyond the bound, and drop what has become too old, instead of waiting."""
    carries: bool = field(default=True, init=False)

    def wanted(self, jobs: Jobs) -> int:
        """Return how many more groups fit under the bound."""
        last = min(jobs.version + 1 + self.max_staleness + self.drops, jobs.last_step)
        return max(0, (last - jobs.next_step + 1) * jobs.batch_size - len(jobs))

    def accepts(self, version: int, jobs: Jobs) -> bool:
        """Say whether tokens are of the engine's weights: a group with older ones might come too late."""
        return version >= jobs.version

    def expired(self, jobs: Jobs) -> list[Job]:
        """Return what is older than the bound; where admission keeps the bound there is none."""
        return [job for job in jobs.kept if jobs.age(job) > self.max_staleness] if self.drops else []

    def batch(self, jobs: Jobs) -> list[Job] | None:
        """Return the next groups, once no other can come before them."""
        if len(jobs.kept) < jobs.batch_size:
            return None
        if self.in_completion_order:
            if not self.drops and self._lacks_old_ones(jobs):
                return None
            return sorted(jobs.kept, key=lambda job: job.version)[: jobs.batch_size]
        batch = sorted(jobs.kept, key=lambda job: job.number)[: jobs.batch_size]
        return None if any(job.number < batch[-1].number for job in jobs.undecided) else batch

    def _lacks_old_ones(self, jobs: Jobs) -> bool:
        """Say whether the next step has to wait for older groups: the later ones that they may be in are full without them.

        Those submitted under v or earlier fill their last places up to step v + 1 + max_staleness. A younger group that takes
        one of the places has to leave enough of them.
        """
        running, n_running = Counter(job.version for job in jobs.undecided), 0
        for version in sorted(running):
            n_running += running[version]
            n_later = max(0, version + 1 + self.max_staleness - jobs.next_step) * jobs.batch_size
            if n_running > n_later:
                return True
        return False
