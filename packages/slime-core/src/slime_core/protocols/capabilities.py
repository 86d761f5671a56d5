"""Capabilities of engines and trainers as data, known before they are built and in every process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do."""

    transports: tuple[str, ...] = ()
    """Weight transports that it can receive by, best first; none if it generates nothing and takes no weights."""
    other_transports: bool = False
    """Whether it also receives by any other installed transport (group `slime.transports`)."""
    images: bool = False
    """Whether `generate` may be given images."""
    reports_load: bool = False
    """Whether it has the method `current_load` (`ReportsLoad`), which says how busy it is."""
    asks_for_weights: bool = False
    """Whether it has the method `weights_wanted` (`AsksForWeights`), which says that it has use for an update now."""
    completions: frozenset[str] = frozenset()
    """Entries of `Completion.metadata` that it fills when a run needs them (hook `slime_engine_needs`)."""

    def takes(self, transport: str) -> bool:
        """Return whether it receives weights by a transport, if that is installed."""
        return self.other_transports or transport in self.transports


@dataclass(frozen=True, kw_only=True)
class TrainerCapabilities:
    """What a trainer can do."""

    transports: tuple[str, ...] = ()
    """Weight transports that it can send by, best first; none if it has no weights."""
    other_transports: bool = False
    """Whether it also sends by any other installed transport (group `slime.transports`)."""
    learns: bool = True
    """Whether it trains; one that does not serves evaluations only."""
    ranked: bool = False
    """Whether its factory may build one of several ranks; see `Rank`."""
    background_save: bool = False
    """Whether `save` may write in the background."""
    pools: frozenset[str] = frozenset()
    """Roles whose ranks may be a pool of their own; it is a `PooledTrainer` if there are some."""
    phases: bool = False
    """Whether `phases` says what `train` did and when."""
    offloads_weights: bool = False
    """Whether it has the methods `offload_weights` and `onload_weights` (`OffloadsWeights`)."""
    stage_senders: bool = False
    """Whether a rank of each pipeline stage can send its stage's weights (`SendsByStage`)."""

    def takes(self, transport: str) -> bool:
        """Return whether it sends weights by a transport, if that is installed."""
        return self.other_transports or transport in self.transports
