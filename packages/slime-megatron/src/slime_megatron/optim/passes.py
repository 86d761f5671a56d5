"""`Passes`: a model's passes over micro-batches, forward alone or with gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from slime_core.runtime.phase_times import PhaseTimes
from torch import Tensor
from torch.nn import Module

from slime_megatron.batch.micro_batch import MicroBatch, MicroBatches
from slime_megatron.parallel.process_groups import World

#: (micro-batch, what the output processor made of the model's output) -> anything.
ForEachMicroBatch = Callable[[MicroBatch, Any], Any]


class Passes:
    """Runs this rank's part of a model. Methods are collective over the world.

    Args:
        model: of Megatron, wrapped for gradients or not.
        world: of the ranks.
        times: takes down micro-batches.
        output_processor: what the model's output becomes; see `response_log_probs`.
    """

    def __init__(
        self, model: Module, world: World, *, times: PhaseTimes, output_processor: Callable[..., Any]
    ) -> None:
        self._model, self._world, self._times = model, world, times
        self._output_processor = output_processor
        self._max_tokens: int = get_attr_wrapped_model(model, "max_sequence_length")

    @torch.no_grad()
    def forward(self, steps: Sequence[MicroBatches], like: Tensor, output: Callable[[Any], Tensor]) -> Tensor:
        """Return numbers for each response token of the batch, under the weights as they are, in the shape of `like`.

        Args:
            steps: this rank's micro-batches; those of all ranks cover every token.
            like: a column [T] of the batch, or k of them.
            output: picks the numbers of a micro-batch, [R] or [k, R], from what the output processor returned.
        """
        found = torch.full_like(like, math.nan)

        def keep(micro: MicroBatch, made: Any) -> None:
            found[..., micro.columns] = output(made)

        for step in steps:
            self.run(step, keep, forward_only=True)
        return self._world.gather_columns(found)

    def run(self, step: MicroBatches, each: ForEachMicroBatch, *, forward_only: bool) -> list[Any]:
        """Run the model, and its gradients unless `forward_only`, over micro-batches; return what `each` returned."""

        begins: list[float] = []

        def forward(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            begins.append(time.perf_counter())
            micro = next(micro_batches)
            output = model(
                input_ids=micro.tokens,
                position_ids=None,
                attention_mask=None,
                packed_seq_params=micro.packed,
                output_processor=self._output_processor,
                output_processor_context=micro.responses,
            )
            return output, partial(_call, each, micro)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(step),
            model=self._model,
            num_microbatches=len(step),
            seq_length=self._max_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self._times.add_each("micro_batch", begins)
        return results


def _call(each: ForEachMicroBatch, micro: MicroBatch, output: Any, non_loss_data: bool = False) -> Any:
    """Call `each`; Megatron adds `non_loss_data` where no gradient is wanted."""
    return each(micro, output)
