"""How a kit says that a promise is broken, and the samples that kits ask with."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slime_core.errors import ContractError
from slime_core.samples import Group, Sample, Status

#: Longest that a kit waits for the answer of an asynchronous part, seconds.
PATIENCE_S = 300.0


def require(kept: bool, where: str, *, found: Any, wanted: str) -> None:
    """Raise ContractError unless a promise is kept."""
    if not kept:
        raise ContractError(f"{where}: found {found}; wanted {wanted}")


@contextmanager
def answering(where: str, wanted: str) -> Iterator[None]:
    """Turn whatever the block raises into a ContractError, whose cause it is."""
    try:
        yield
    except ContractError:
        raise
    except (Exception, SystemExit) as error:
        raise ContractError(f"{where}: found {type(error).__name__}: {error}; wanted {wanted}") from error


async def refusing(where: str, call: Awaitable[Any], kind: type[Exception]) -> None:
    """Check that what is awaited is refused by an error of one kind."""
    try:
        answer = await call
    except kind:
        return
    except Exception as error:
        raise ContractError(
            f"{where}: found {type(error).__name__}: {error}; wanted {kind.__name__}"
        ) from error
    raise ContractError(f"{where}: found the answer {str(answer)[:60]}; wanted {kind.__name__}")


def run_within[T](where: str, body: Coroutine[Any, Any, T], *, seconds: float = PATIENCE_S) -> T:
    """Run a coroutine in an event loop of its own, for so long at most."""

    async def main() -> T:
        async with asyncio.timeout(seconds):
            return await body

    try:
        return asyncio.run(main())
    except TimeoutError as error:
        raise ContractError(f"{where}: found no answer within {seconds:g} s; wanted one") from error


def name_of(function: Callable[..., Any]) -> str:
    """Return how messages call a plugin: `acme.rewards.exact`."""
    inner: Any = inspect.unwrap(getattr(function, "func", function))
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def sample_of(response: str = "2", *, index: int = 0, reward: float | None = None) -> Sample:
    """Return a finished sample of the prompt `1+1=`, whose label is `2`; an id a letter."""
    prompt = "1+1="
    return Sample(
        index=index, group_index=index // 4, prompt=prompt, label="2", response=response, reward=reward,
        tokens=[ord(letter) for letter in prompt + response], response_length=len(response),
        rollout_log_probs=[-0.5] * len(response), status=Status.COMPLETED, metadata={},
    )  # fmt: skip


def group_of(rewards: Sequence[float]) -> Group:
    """Return a finished group of samples with these rewards."""
    return [
        sample_of("2" if reward > 0 else "three", index=i, reward=reward) for i, reward in enumerate(rewards)
    ]
