"""`GenerateState`: what a generate function finds of its process there: tokenizer, sampling parameters, a semaphore."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from slime_core.rollout.group import common_params

from slime_compat.engine.tokenizer import foreign_tokenizer
from slime_compat.views.generating.rollout import generate_and_rm_group
from slime_compat.views.running.runtime import Runtime, current, params_dict
from slime_compat.views.samples.sample import ReferenceSample as Sample


class GenerateState:
    """Of the call that is made now; equal calls `GenerateState(args)` give the same object.

    Attributes:
        tokenizer: the transformers tokenizer of the run, or what behaves as one.
        processor: the transformers processor; None where the model sees no images.
        sampling_params: of a training sample.
        semaphore: free; requests pass the run's own limit.
        aborted: whether the rollout has all that it needs; requests then answer `abort` by themselves.
    """

    def __new__(cls, args: Any = None) -> GenerateState:
        """Return the state of the call."""
        runtime = current("GenerateState", args)
        if runtime.state is None:
            runtime.state = _filled(super().__new__(cls), runtime)
        return runtime.state

    def submit_generate_tasks(self, samples: Sequence[list[Sample]]) -> None:
        """Begin to generate and score groups; `pendings` has a task for each."""
        for group in samples:
            params = dict(self.sampling_params)  # type: ignore[attr-defined]  # as below
            self.pendings.add(asyncio.create_task(generate_and_rm_group(self.args, group, params)))  # type: ignore[attr-defined]  # as below
        self.remaining_batch_size += len(samples)

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Do nothing: the engine chooses among its ranks."""
        yield 0

    def reset(self) -> None:
        """Forget what is in flight."""
        self.pendings: set[Any] = set()
        self.remaining_batch_size, self.aborted = 0, False


def _filled(state: GenerateState, runtime: Runtime) -> GenerateState:
    state.args = runtime.args  # type: ignore[attr-defined]  # attributes as they are there
    state.tokenizer = foreign_tokenizer(runtime.context.tokenizer)  # type: ignore[attr-defined]  # as above
    processor = getattr(getattr(runtime.context.tokenizer, "_processor", None), "inner", None)
    state.processor = processor if runtime.context.capabilities.images else None  # type: ignore[attr-defined]  # as above
    params = runtime.params
    if params is None and runtime.run is not None:
        params = common_params(runtime.run.settings.rollout)
    state.sampling_params = {} if params is None else params_dict(params)  # type: ignore[attr-defined]  # as above
    state.semaphore = asyncio.Semaphore(runtime.args.sglang_server_concurrency)  # type: ignore[attr-defined]  # as above
    state.reset()
    return state
