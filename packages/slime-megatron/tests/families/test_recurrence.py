"""States of packed sequences: reset between sequences, carried from a shared prefix into each of its suffixes."""

from __future__ import annotations

import pytest
import torch
from slime_megatron.batch.prompt_groups import PromptGroup

#: Groups of several lengths, which are padded to several batches; prefixes shorter than the two inputs that are remembered.
ROWS = {
    "one": [PromptGroup(5, ())],
    "alike": [PromptGroup(5, ()), PromptGroup(5, ())],
    "mixed": [
        PromptGroup(5, (3, 7, 2)),
        PromptGroup(9, ()),
        PromptGroup(1, (4, 4)),
        PromptGroup(6, (3, 0, 1)),
    ],
}


def running_sums(inputs, real, before):
    """Return, of each token, the decayed sum of all before it and itself, and the token before the one before it."""
    from slime_megatron.families.recurrence import State

    (x,) = inputs
    n, tokens = x.shape[:2]
    memory = x.new_zeros(n, 1) if before is None else before.memory
    earlier = x.new_zeros(n, 2, 1) if before is None else before.inputs
    sums = []
    for t in range(tokens):
        memory = torch.where(real[:, t, None], 0.5 * memory + x[:, t], memory)
        sums.append(memory)
    seen = torch.cat((earlier, x), dim=1)
    last = real.sum(1, keepdim=True) + torch.arange(2)
    out = torch.cat((torch.stack(sums, dim=1), seen[:, :tokens]), dim=-1)
    return out, State(seen[torch.arange(n)[:, None], last], memory)


def one_by_one(groups, x):
    """Return the same by a loop over the tokens of each sequence."""
    rows, tokens = [], iter(x)

    def go_on(before, total, n):
        for _ in range(n):
            before, total = [*before, next(tokens)], 0.5 * total
            total = total + before[-1]
            rows.append(torch.cat((total, before[-3] if len(before) > 2 else torch.zeros_like(total))))
        return before, total

    for group in groups:
        prefix = go_on([], torch.zeros(1, dtype=x.dtype), group.prefix)
        for n in group.suffixes:
            go_on(*prefix, n)
    return torch.stack(rows)


@pytest.mark.parametrize("row", ROWS)
def test_no_state_passes_between_sequences_and_suffixes_go_on_from_their_prefix(row):
    from slime_megatron.batch.packing import pack
    from slime_megatron.families.recurrence import recur

    groups = ROWS[row]
    n = sum(group.n_tokens for group in groups)
    tables = (torch.zeros(16, 2), torch.zeros(16, 2))
    x, y = (torch.arange(1.0, n + 1, dtype=torch.float64)[:, None].requires_grad_() for _ in range(2))
    found, wanted = recur([x], pack(groups, tables), running_sums), one_by_one(groups, y)
    assert torch.equal(found, wanted)
    weights = torch.linspace(-1, 1, 2 * n, dtype=torch.float64).view(n, 2)
    for out in (found, wanted):
        (out * weights).sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=0, atol=1e-12)
