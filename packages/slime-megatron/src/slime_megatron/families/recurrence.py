"""Recurrent layers over packed sequences: no state passes from one sequence to another, and shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_megatron.batch.packing import PackedSequences, PaddedSegments
from slime_megatron.model.layers.attention import PadTokens, UnpadTokens


@dataclass(frozen=True)
class State:
    """What a recurrent layer knows of a batch of sequences after the last token of each."""

    inputs: Tensor
    """[batch, n, channels]: the last n inputs of the convolution, zeros before a sequence's first token."""
    memory: Tensor
    """float32 [batch, heads, key width, value width]."""

    def before(self, batch: PaddedSegments) -> State:
        """Return the states before segments that follow rows of this batch: of each row, once for each of its segments."""
        rows = slice(batch.first, batch.first + batch.n_parents)
        inputs, memory = (x[rows].repeat_interleave(batch.size, dim=0) for x in (self.inputs, self.memory))
        return State(inputs, memory)


#: (inputs [batch, tokens, ...], which tokens are no padding: bool [batch, tokens], states before the first tokens) ->
#: (outputs [batch, tokens, ...], states after the last token of each sequence).
Recurrence = Callable[[Sequence[Tensor], Tensor, State | None], tuple[Tensor, State]]


def recur(inputs: Sequence[Tensor], packed: PackedSequences, recurrence: Recurrence) -> Tensor:
    """Return the outputs [t, ...] of a recurrence over each packed sequence.

    What sequences share is computed once: each goes on from its state, in which the gradients of all of them add up.

    Args:
        inputs: [t, ...] each.
        packed: the row.
        recurrence: of a padded batch.
    """
    assert packed.zigzag is None, "no state passes between context-parallel ranks"
    padding_map = packed.padding_map
    real = torch.ones(packed.n_slots, dtype=torch.bool, device=inputs[0].device)
    if padding_map is not None:
        inputs = [PadTokens.apply(x, padding_map) for x in inputs]
        real = torch.zeros_like(real).index_fill_(0, padding_map.slots, True)
    sizes = [batch.n_slots for batch in packed.batches]
    slots = list(zip(*(x.split(sizes) for x in (*inputs, real)), strict=True))

    def run(own: Sequence[Tensor], rows: int, before: State | None) -> State:
        *batch, is_real = (x.unflatten(0, (rows, -1)) for x in own)
        found, state = recurrence(batch, is_real, before)
        outputs.append(found.flatten(0, 1))
        return state

    outputs: list[Tensor] = []
    states: list[State] = []
    for shape, own in zip(packed.batches, slots, strict=True):
        before = None if shape.parent is None else states[shape.parent].before(shape)
        states.append(run(own, shape.n_rows, before))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat if padding_map is None else UnpadTokens.apply(flat, padding_map)
