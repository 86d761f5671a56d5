"""`Pools`: the engines of a fleet by what they do, of which a request gets one each: one pool, or prefill and decode engines."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.errors import EngineError

from slime_sglang.fleet.replica import Replica

#: What an engine does, by its role.
_WORK = {"regular": "generate", "prefill": "prefill", "decode": "decode"}


class Pools:
    """Says what the pools of a fleet can do, and have.

    Args:
        replicas: one for each engine.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        roles = [replica.engine.role for replica in replicas]
        self.all = [
            [replica for replica, own in zip(replicas, roles, strict=True) if own == role]
            for role in _WORK
            if role in roles
        ]
        """Prefill engines before decode engines."""

    def have(self, version: str) -> bool:
        """Whether an engine of each pool holds a version."""
        return all(any(replica.engine.weight_version == version for replica in pool) for pool in self.all)

    def can_receive(self) -> bool:
        """Whether an engine of each pool is there to take an update."""
        return all(any(replica.is_ready or replica.is_waiting for replica in pool) for pool in self.all)

    def lack(self, version: str, *, served: str | None) -> bool:
        """Whether an engine waits for an update to a version, while others serve the version `served`.

        It does where they have the same one, unless that is None, and where no engine of a pool serves.
        """
        is_awaited = any(replica.is_waiting for pool in self.all for replica in pool)
        can_serve = all(any(replica.is_ready for replica in pool) for pool in self.all)
        return is_awaited and (version == served or not can_serve)

    def check_left(self) -> None:
        """Check that an engine of each pool is there, or may come.

        Raises:
            EngineError: none is left; says what became of each.
        """
        for pool in self.all:
            if all(replica.state == "gone" for replica in pool):
                reasons = "\n".join(f"{replica.name}: {replica.reason}" for replica in pool)
                raise EngineError(f"no engine is left to {_WORK[pool[0].engine.role]}:\n{reasons}")
