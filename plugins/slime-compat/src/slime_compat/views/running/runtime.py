"""`Runtime`: what a function of the reference system reaches of its run by module-level names there: engine, tokenizer, event loop.

There such things are singletons of a process. Here they belong to the call: a context variable, which tasks and threads that
the function starts inherit, and which says clearly where there is no run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.context import RolloutRun
from slime_core.samples.versions import version_number

from slime_compat.views.running.namespace import Args

if TYPE_CHECKING:
    from slime_compat.engine.server import EngineServer
    from slime_compat.views.generating.generate_state import GenerateState


@dataclass(kw_only=True)
class Runtime:
    """The run as the function that is called now sees it."""

    args: Args
    context: GenerateContext
    """Its engine and tokenizer."""
    server: EngineServer
    """Answers the engine's requests over HTTP."""
    loop: asyncio.AbstractEventLoop
    """Of the run."""
    run: RolloutRun | None = None
    """The run, in rollout and evaluation functions."""
    step: int = 0
    """The step that is generated, from 1."""
    params: SamplingParams | None = None
    """How the sample is drawn, in generate functions."""
    n_requests: int = 0
    """Requests of the sample so far: each is drawn anew."""
    own: set[str] = field(default_factory=set)
    """Weights that answered requests of this call."""
    served: set[str] = field(default_factory=set)
    """Weights that answered what the server was asked by anybody in this call."""
    state: GenerateState | None = field(default=None, repr=False)
    """What `GenerateState` returned."""

    @property
    def version(self) -> str | None:
        """Oldest weights that answered a request of the call, or else of anybody in it; or the newest before it; None before the first."""
        return min(self.own or self.served, key=version_number, default=self.server.version)


#: Attribute of `args` that holds the runtime of a whole rollout.
_HELD = "_runtime_of_rollout"
_CURRENT: contextvars.ContextVar[Runtime] = contextvars.ContextVar("slime_compat_runtime")


class HeldRuntime:
    """The runtime of a whole rollout on its `args`, for threads that outlive the call; copies of `args` share it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __deepcopy__(self, memo: Any) -> HeldRuntime:
        """Return itself: a run is not copied."""
        return self


def hold(runtime: Runtime) -> None:
    """Let threads that a rollout function starts find its run by the `args` that they have."""
    vars(runtime.args)[_HELD] = HeldRuntime(runtime)


def current(what: str, args: Any = None) -> Runtime:
    """Return the runtime of the call that is made now, or else the one that `args` holds.

    Raises:
        PluginError: there is none; names what needs it.
    """
    held = getattr(args, _HELD, None)
    runtime = _CURRENT.get(None) or (held.runtime if isinstance(held, HeldRuntime) else None)
    if runtime is None:
        raise PluginError(
            f"{what} needs a run: call it inside a generate, rollout or evaluation function that slime called; rewards and "
            "functions of the trainer have no engine"
        )
    return runtime


def running() -> Runtime | None:
    """Return the runtime of the call that is made now, None where there is no run."""
    return _CURRENT.get(None)


@contextlib.contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Let what is called in the block find this runtime."""
    token = _CURRENT.set(runtime)
    try:
        yield runtime
    finally:
        _CURRENT.reset(token)


def params_dict(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as a request to SGLang has them; without the seed, which each request draws for itself."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
