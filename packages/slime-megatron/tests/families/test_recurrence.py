"""States of packed sequences: reset between sequences, carried from what they share into what follows in each."""

from __future__ import annotations

import pytest
import torch
from slime_megatron.batch.trees.token_tree import TokenTree

#: Trees of several lengths, which are padded to several batches; prompts shorter than the two inputs that are remembered.
ROWS = {
    "one": [TokenTree.of_prompt(5, ())],
    "alike": [TokenTree.of_prompt(5, ()), TokenTree.of_prompt(5, ())],
    "mixed": [
        TokenTree.of_prompt(5, (3, 7, 2)),
        TokenTree.of_prompt(9, ()),
        TokenTree.of_prompt(1, (4, 4)),
        TokenTree.of_prompt(6, (3, 0, 1)),
    ],
    "three levels": [
        TokenTree((9, 6, 9, 4, 8, 7), (0, 6, 5, 4, 2, 1), (1,) * 6),
        TokenTree.of_prompt(9, (1, 2)),
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
    rows, seen = [], 0
    for tree in groups:
        for path, (shared, _) in zip(tree.paths(), tree.spans, strict=True):
            before, total = x[seen + path], torch.zeros(1, dtype=x.dtype)
            for n, token in enumerate(before):
                total = 0.5 * total + token
                if n >= shared:
                    rows.append(torch.cat((total, before[n - 2] if n > 1 else torch.zeros_like(total))))
        seen += tree.n_tokens
    return torch.stack(rows)


@pytest.mark.parametrize("row", ROWS)
def test_no_state_passes_between_sequences_and_each_goes_on_from_what_it_shares(row):
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
