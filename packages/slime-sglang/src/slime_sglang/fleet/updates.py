"""An update of the weights at the engines of a fleet: who loads it, who has it, and who is lost over it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_core.errors import DeadlineError, EngineError, ReceiverLostError, WeightSyncError
from slime_core.weights.sync import check_fingerprints
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.staging import StagedUpdate

from slime_sglang.engine import SglangEngine
from slime_sglang.fleet.replica import Replica
from slime_sglang.fleet.supervisor import gather_all
from slime_sglang.settings.section import FleetSection
from slime_sglang.weights.apply import GroupBrokenError, why_mixed


async def load(replica: Replica, update: StagedUpdate | RanksUpdate) -> None:
    """Have one engine load an update, and compare what it then holds with what was sent.

    Raises:
        WeightSyncError: it refused it, or holds something else.
        GroupBrokenError: its ranks joined the update, and it broke off.
    """
    try:
        held = await replica.engine.load(update)
        check_fingerprints(update.fingerprint, held, version=update.version)
    except WeightSyncError as error:
        error.add_note(f"found by {replica.name}")
        raise


async def load_by_ranks(replicas: Sequence[Replica], update: RanksUpdate, section: FleetSection) -> None:
    """Have the ranks of all engines join an update: of those that lack it, or of all where none does.

    Where one fails, the others are told that the update is off, if they have not begun.

    Raises:
        WeightSyncError: one refused it, or holds something else.
        ReceiverLostError: some engines were lost, and the update broke off at others; or all were lost.
        EngineError: without fault tolerance, the first failure.
    """
    is_tolerant = section.use_fault_tolerance
    there = [replica for replica in replicas if not is_tolerant or replica.is_ready or replica.is_waiting]
    members = [replica for replica in there if replica.engine.weight_version != update.version] or there
    if not members:
        raise ReceiverLostError(f"update to version {update.version}: every engine was lost before it began")
    update.begin(sum(replica.engine.n_ranks for replica in members))

    async def join(replica: Replica) -> None:
        try:
            await load(replica, update)
        except BaseException:
            update.call_off()
            raise

    if not is_tolerant:
        await gather_all([join(replica) for replica in members])
        return
    asked = [(replica, replica.engine) for replica in members]
    answers = await asyncio.gather(*(join(replica) for replica in members), return_exceptions=True)
    lost, broken = list[str](), list[GroupBrokenError]()
    for (replica, engine), answer in zip(asked, answers, strict=True):
        if isinstance(answer, EngineError | DeadlineError):
            why, _, _ = str(answer).partition("\n")  # the end of its log follows
            lost.append(f"{replica.name} ({why})")
            await lose_engine(replica, engine, answer)
        elif isinstance(answer, GroupBrokenError):
            broken.append(answer)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(
            answer, EngineError | DeadlineError | GroupBrokenError
        ):
            raise answer
    if broken and not lost:
        raise broken[0]
    if broken or len(lost) == len(members):
        raise ReceiverLostError(f"update to version {update.version}: {'; '.join(lost)} was lost during it")


async def lose_engine(replica: Replica, engine: SglangEngine, error: Exception) -> None:
    """Have a replica's engine, which failed, be replaced, unless it is already."""
    if replica.state in ("serving", "waiting") and replica.engine is engine:  # the supervisor was not faster
        replica.lose(str(error))
        await engine.kill()  # which the supervisor sees


async def lose_those_with(replicas: Sequence[Replica], version: str, *, served: str) -> None:
    """Stop the engines that have loaded an update which failed, as all engines serve one version, or a part of it.

    Args:
        replicas: of the fleet.
        version: of the update.
        served: which version the others have.
    """
    mixed = [replica.engine for replica in replicas if replica.engine.is_held]
    ahead = [replica.engine for replica in replicas if replica.engine.weight_version == version != served]
    why = f"it had loaded the update to version {version}, which failed"
    await asyncio.gather(
        *(engine.lose(why) for engine in ahead if engine not in mixed),
        *(engine.lose(why_mixed(version)) for engine in mixed),
    )
