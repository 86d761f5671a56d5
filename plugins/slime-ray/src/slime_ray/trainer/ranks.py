"""`RankActors`: the driver's handles of a trainer's ranks: called all at once, and all killed when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from slime_core.errors import TrainerError
from slime_core.protocols import Role
from slime_core.runtime.calls import Callee, calling
from slime_core.runtime.processes.stacks import ask_for_stacks

from slime_ray.process.ends import still_running
from slime_ray.process.failure import Failure, killed_for_memory
from slime_ray.trainer.rank import RankAddress

logger = logging.getLogger(__name__)

#: What a rank is asked first. Until it has answered, its process may not be there, and Ray alone knows why.
FIRST_CALL = "whereabouts"
#: Seconds that ranks get to say what is wrong with them, when another has failed, and to end when Ray asks them to.
_GRACE_S = 2.0
#: Seconds in which a killed process is gone.
_GONE_S = 5.0
#: Files in the stacks of a rank that are Ray's.
_RAYS_OWN = ("/site-packages/ray/",)
#: Bytes of a log's end that an error shows.
_TAIL = 2000


@dataclass(frozen=True)
class Member:
    """One rank."""

    actor: Any
    """Handle of its `RankProcess`."""
    name: str
    """How messages call it: `rank 1 of 2 (process 123 on 10.0.0.1)`."""
    log: Path
    role: Role = "policy"
    """What it holds."""
    process: RankAddress | None = None
    """Where it is, once that is known."""
    pid_here: int | None = None
    """Its process, where that is on the driver's machine."""


class RankDied(TrainerError):
    """The process of a rank ended by itself, or was killed from outside."""


class RankActors:
    """All ranks of a trainer, those of the policy first. After the first error or cancelled call all of them are killed."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    @property
    def alive(self) -> bool:
        """Whether they can be asked."""
        return bool(self._members)

    def found(self, processes: Sequence[RankAddress], own_address: str) -> list[int]:
        """Take down where the ranks are; returns the processes of this machine."""
        self._members = [
            dataclasses.replace(
                member,
                name=f"{member.name} (process {process.pid} on {process.address})",
                process=process,
                pid_here=process.pid if process.address == own_address else None,
            )
            for member, process in zip(self._members, processes, strict=True)
        ]
        return [member.pid_here for member in self._members if member.pid_here is not None]

    @property
    def roles(self) -> tuple[Role, ...]:
        """What ranks hold, in their order."""
        return tuple(dict.fromkeys(member.role for member in self._members))

    def of_machines(self, role: Role) -> list[int | None]:
        """Return, for each rank of a role, its machine's number among theirs, if it is the first there; else None."""
        nodes = [member.process and member.process.node for member in self._members if member.role == role]
        machines = list(dict.fromkeys(nodes))
        return [None if node in nodes[:number] else machines.index(node) for number, node in enumerate(nodes)]

    async def ask(self, method: str, *args: Any, role: Role | None = None) -> list[Any]:
        """Call a method of every rank, or of those of a role, with the same arguments; see `ask_each`."""
        asked = self._alive(method, role)
        return await self._ask(method, asked, [args] * len(asked))

    async def ask_roles(self, method: str, *args: Any) -> dict[Role, Any]:
        """Call a method of every rank with the same arguments; return what the first rank of each role answers."""
        roles = [member.role for member in self._alive(method)]
        answers = await self.ask(method, *args)
        return {role: answers[roles.index(role)] for role in self.roles}

    async def ask_each(
        self, method: str, args: Sequence[tuple[Any, ...]], *, role: Role | None = None
    ) -> list[Any]:
        """Call a method of every rank, or of those of a role, with arguments of its own, and return their answers.

        Raises:
            RankDied: the process of a rank ended; names it, and shows the end of its log.
            Exception: what a rank raised, the first one's.
        """
        return await self._ask(method, self._alive(method, role), args)

    async def _ask(
        self, method: str, members: Sequence[Member], args: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call a method of some ranks; where one fails, all end, those that were not asked too."""
        failed: list[Exception] = []

        async def one(member: Member, own: tuple[Any, ...]) -> Any:
            try:
                return await self._answer(member, method, own)
            except Exception as error:
                failed.append(error)
                raise

        calls = [asyncio.ensure_future(one(member, own)) for member, own in zip(members, args, strict=True)]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if failed:
                await asyncio.wait(calls, timeout=_GRACE_S)
                raise _cause(failed)
        except BaseException:
            for call in calls:
                call.cancel()
            await self.kill()
            raise
        return [call.result() for call in calls]

    async def ask_first(self, method: str, *args: Any) -> Any:
        """Call a method of rank 0 beside what all ranks are asked; an error here is no end of the others."""
        return await self._answer(self._alive(method)[0], method, args)

    async def kill(self) -> None:
        """End every process, and wait for those of this machine."""
        members, self._members = self._members, []
        here = [pid for member in members if (pid := member.pid_here) is not None and _is_rank(pid)]
        for member in members:
            with contextlib.suppress(RayError):
                ray.kill(member.actor)
        for pid in await still_running(
            here, _GRACE_S
        ):  # one that is stopped or stuck does not hear what Ray asks
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await still_running(here, _GONE_S)

    def _alive(self, method: str, role: Role | None = None) -> list[Member]:
        if not self._members:
            raise TrainerError(f"{method}: the ranks have ended, after an earlier error or close()")
        return [member for member in self._members if role in (None, member.role)]

    @staticmethod
    async def _answer(member: Member, method: str, args: tuple[Any, ...]) -> Any:
        try:
            with calling(method, Callee(member.name, partial(_stacks_of, member), _RAYS_OWN)):
                answer = await getattr(member.actor, method).remote(*args)
        except RayError as error:
            died = _died(member, method, error)
            if method == FIRST_CALL:
                died.add_note(str(error))
            raise died from error
        if isinstance(answer, Failure):
            raise answer.error(member.name)
        return answer


async def _stacks_of(member: Member) -> str:
    """Return the stacks of a rank, which it writes to its log; a task on its machine asks for them where that is another one."""
    if member.process is None:
        return ""
    if member.pid_here is not None:
        return await asyncio.to_thread(_ask_rank, member.pid_here, member.log)
    there = NodeAffinitySchedulingStrategy(member.process.node, soft=False)
    asking = ray.remote(_ask_rank).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    told: str = await asking.remote(member.process.pid, member.log)
    return told


def _ask_rank(pid: int, log: Path) -> str:
    return ask_for_stacks([pid], log) if _is_rank(pid) else ""


def _cause(failed: Sequence[Exception]) -> Exception:
    """Return the error that the others follow from: of a rank that died, else the first; the others are noted on it."""
    dead = [error for error in failed if isinstance(error, RankDied)]
    cause = (dead or failed)[0]
    for error in failed:
        if error is not cause and str(error) != str(cause):
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            cause.add_note(f"after it: {type(error).__name__}: {error}{where}")
    return cause


def _died(member: Member, method: str, error: RayError) -> RankDied:
    tail = b""
    with contextlib.suppress(OSError):
        tail = member.log.read_bytes()[-_TAIL:]
    shown = f" and ends:\n{tail.decode(errors='replace').strip()}" if tail.strip() else " and is empty"
    why = killed_for_memory(error) or "it crashed, ran out of memory or was killed"
    return RankDied(f"{member.name} died during {method}: {why}; its log is {member.log}{shown}")


def _is_rank(pid: int) -> bool:
    """Say whether the process of this number is a rank: another one may have its number by now."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RankProcess")
    except OSError:
        return False
