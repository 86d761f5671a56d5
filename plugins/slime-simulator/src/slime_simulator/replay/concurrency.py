"""When a recorded run had room for another group, and which decision it took next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slime_core.protocols import RolloutEngine
from slime_core.rundir.events import DISPATCHER, EventLog

from slime_simulator.parts.concurrency import OpenLimit
from slime_simulator.replay.recording import NO_DECISION


class DecisionLog(EventLog):
    """Events, of which it counts the decisions."""

    n_decisions = 0
    _version: int | None = None

    def moment(self, name: str, *, lane: str, **more: Any) -> None:
        """Take down what happens now."""
        super().moment(name, lane=lane, **more)
        is_again = name == "weights_arrived" and more["version"] == self._version
        if lane == DISPATCHER and name != NO_DECISION and not is_again:
            self.n_decisions += 1
        if name == "weights_arrived":
            self._version = more["version"]


class RecordedLimit(OpenLimit):
    """Has room for another group where the recorded run submitted one next; requests, whose ends are known, pass at once."""

    def __init__(
        self,
        limit: int | Literal["auto"] | None,
        engine: RolloutEngine,
        events: DecisionLog,
        recorded: Sequence[Mapping[str, Any]],
    ) -> None:
        super().__init__(limit, engine, events)
        self._told, self._recorded = events, recorded

    @property
    def holds_back(self) -> bool:
        """Whether the next decision was another one."""
        n = self._told.n_decisions
        return n < len(self._recorded) and self._recorded[n]["name"] != "group_submitted"
