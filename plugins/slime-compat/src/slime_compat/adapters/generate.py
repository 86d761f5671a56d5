"""`ReferenceGenerate`: a custom generate function of the reference system as a generator."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import PluginError, SampleError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample, Status
from slime_core.samples.versions import version_number

from slime_compat.adapters.calling import Theirs
from slime_compat.adapters.table import takes
from slime_compat.engine.server import HOST, SERVICE, EngineServer
from slime_compat.views.running.namespace import Args
from slime_compat.views.running.runtime import Runtime, params_dict, using
from slime_compat.views.samples.sample import viewed

#: States in which a sample is trained on.
_ENDED = (Status.COMPLETED, Status.TRUNCATED)


class ReferenceGenerate:
    """Calls `async fn(args, sample, sampling_params[, evaluation=...])`; returns its samples, made fit for a run of ours.

    A sample that begins has no ids yet, as there: the function encodes its prompt, which may be another than the data's. What a
    function that writes a sample's fields itself leaves out is filled in: spans that were put in, from the loss mask; weights,
    the oldest that the call was answered by.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    #: It brings its prompt and bounds its length as its own function does.
    is_free = True

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.generators", path, run_args)
        self._says_evaluation = takes(self._theirs.function, "evaluation")

    async def __call__(
        self, ctx: GenerateContext, sample: Sample, params: SamplingParams
    ) -> Sample | list[Sample]:
        """Generate one sample.

        Raises:
            SampleError: the function returned something else than samples, or fields that do not fit.
        """
        runtime = await runtime_of(self._theirs.args, ctx)
        runtime.params = params
        given = viewed(sample)
        prompt_ids = begin(given)
        more = {"evaluation": ctx.evaluation} if self._says_evaluation else {}
        with using(runtime), runtime.server.noting(runtime.served):
            answer = self._theirs.function(runtime.args, given, params_dict(params), **more)
            if not inspect.isawaitable(answer):
                raise PluginError(
                    f"{self._theirs.who}: is not async; wanted `async def`, as {self._theirs.form}"
                )
            answer = await answer
        made = answer if isinstance(answer, list) else [answer]
        if not made or not all(isinstance(one, Sample) for one in made):
            raise self._theirs.refuse(answer)
        for one in made:
            settle(one, sample, prompt_ids, version=runtime.version)
        return answer if isinstance(answer, list) else made[0]


async def runtime_of(args: Args, ctx: GenerateContext, **more: Any) -> Runtime:
    """Return what a function finds of its run; the run's engine listens from then on."""
    server = ctx.services.setdefault(SERVICE, EngineServer())
    await server.start(ctx)
    args.sglang_router_ip, args.sglang_router_port = HOST, server.port
    return Runtime(args=args, context=ctx, server=server, loop=asyncio.get_running_loop(), **more)


def begin(sample: Sample) -> list[int]:
    """Make a sample that was not generated yet look as it does there, without ids; returns its prompt's."""
    prompt_ids = [int(token) for token in sample.tokens[: sample.prompt_length]]
    if sample.response_length == 0 and not sample.multimodal_inputs:
        sample.tokens = []
    return prompt_ids


def settle(sample: Sample, given: Sample, prompt_ids: Sequence[int], *, version: str | None) -> None:
    """Fill in what a function of the reference system need not set.

    Args:
        sample: that it returned.
        given: that it was given.
        prompt_ids: of that one.
        version: the oldest of the weights that answered; None where nothing was asked.

    Raises:
        SampleError: the loss mask has another length than the response.
    """
    viewed(sample)
    sample.tokens = [int(token) for token in sample.tokens]
    if not sample.tokens and sample.response_length == 0:
        sample.tokens = list(prompt_ids)
    # Numbers of a user's own mean other things.
    sample.index, sample.group_index = given.index, given.group_index
    if sample is not given and sample.rollout_id is None:
        sample.rollout_id = given.index if given.rollout_id is None else given.rollout_id
    if sample.response_length == 0 and sample.tokens and sample.status in _ENDED:
        _mark_empty(sample)
    if sample.loss_mask is not None:
        sample.loss_mask = [int(one) for one in sample.loss_mask]
        if len(sample.loss_mask) != sample.response_length:
            raise SampleError(
                f"{sample.name}: loss_mask has {len(sample.loss_mask)} entries for response_length {sample.response_length}; "
                "append with append_response_tokens, or extend both"
            )
        if not sample.environment_spans:
            sample.environment_spans = _zeros(sample.loss_mask)
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = [float(one) for one in sample.rollout_log_probs]
    if sample.response_length and not sample.weight_versions and version:
        sample.weight_versions, sample.weight_version_starts = [version], [0]
    elif len(sample.weight_version_starts) != len(sample.weight_versions):
        known = [str(sample.weight_versions[0]), *([version] if version else ())]
        sample.weight_versions, sample.weight_version_starts = [min(known, key=version_number)], [0]
    if sample.status is Status.PENDING and sample.response_length:
        sample.status = Status.COMPLETED  # as there, where only truncated and aborted samples are told apart
    if sample.status is Status.FAILED and not sample.failure:
        sample.failure = "its generate function says that it failed"


def _mark_empty(sample: Sample) -> None:
    """Give a response without tokens one that nobody trains on, the last one again: batches hold no empty responses."""
    sample.tokens, sample.response_length = [*sample.tokens, sample.tokens[-1]], 1
    sample.loss_mask, sample.environment_spans = [0], [[0, 1]]
    sample.rollout_log_probs = None if sample.rollout_log_probs is None else [0.0]


def _zeros(mask: Sequence[int]) -> list[list[int]]:
    """Return [begin, end) of each run of zeros, but for one up to the end of tokens that nobody trains on at all."""
    if not any(mask):
        return []
    spans: list[list[int]] = []
    for place, one in enumerate(mask):
        if one:
            continue
        if spans and spans[-1][1] == place:
            spans[-1][1] = place + 1
        else:
            spans.append([place, place + 1])
    return spans
