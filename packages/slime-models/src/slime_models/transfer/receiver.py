"""`UpdateReceiver`: agrees on weight updates and receives them, by any installed transport, on the host of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slime_core.plugins.registry import Registry
from slime_core.protocols import TransferPlan
from slime_core.weights.sync import Agreement

from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.transport import TransportReceiver, transport_of


class UpdateReceiver:
    """The receiving side of an engine: updates, one at a time, each received once, however many servers load it.

    Args:
        storage: where they are staged.
        dtype: of tensors that are not quantised, as torch spells it.
        registry: the installed plugins.
        quantization: `quantization_config` of the engine's config.json; None where it is not quantised.
    """

    def __init__(
        self,
        storage: UpdateStorage,
        *,
        dtype: str,
        registry: Registry,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self._storage, self._agreement, self._registry = storage, Agreement(), registry
        self._dtype, self._quantization = dtype, quantization
        self._receivers: dict[str, TransportReceiver] = {}
        self.kept: StagedUpdate | None = None
        """The newest update, for servers that start later; None where it is not staged completely any more."""
        self.keeps_nothing = False
        """Whether the newest update was one that ranks of servers join, so that a server that starts later waits for the next."""

    def open(self, transport: str, version: str, *, has_ranks: bool = False) -> TransferPlan:
        """Agree on an update by `transport`.

        Args:
            transport: its name.
            version: of the weights.
            has_ranks: whether the engine has servers whose ranks can join it; others load only what is staged.

        Raises:
            WeightSyncError: no such transport is installed, or it wants ranks of servers.
        """
        self._storage.has_ranks = has_ranks
        found = transport_of(self._registry, transport, version=version)
        if transport not in self._receivers:
            self._receivers[transport] = found.create_receiver(self._storage)
        channel = self._receivers[transport].open(version)
        return self._agreement.open(
            TransferPlan(
                transport=transport,
                version=version,
                dtype=self._dtype,
                quantization=self._quantization,
                senders=found.senders,
                channel=channel,
            )
        )

    @contextmanager
    def taking(self, plan: TransferPlan) -> Iterator[None]:
        """Hold the update that was agreed on while it arrives and servers load it; an error in the context drops it.

        Raises:
            WeightSyncError: it is not the update agreed on.
        """
        with self._agreement.taking(plan):
            before = self.kept
            try:
                yield
            except BaseException:
                self._receivers[plan.transport].give_up(plan)
                self._storage.forget()
                self.kept = None if before is None or self._storage.is_staged(before) else before
                raise
            finally:
                self._storage.drop_folders(but=self.kept.folder if self.kept is not None else None)

    async def arrive(self, plan: TransferPlan) -> StagedUpdate | RanksUpdate:
        """Receive the update, and return it once it is complete on this host, or has begun. No server may be loading an earlier one.

        Raises:
            WeightSyncError: a tensor is unknown, misshapen or missing, or the update is another; says which.
            DeltaBaseError: changes are to other weights than those that are staged.
        """
        self.kept = None
        update = await self._receivers[plan.transport].arrive(plan)
        self.keeps_nothing = isinstance(update, RanksUpdate)
        if isinstance(update, StagedUpdate):
            self.kept = update
        return update

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self.kept = None
        self._storage.close()
