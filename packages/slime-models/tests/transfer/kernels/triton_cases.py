"""The kernel of Triton against PyTorch's operators: `test_transfer_kernels.py` runs these tests, on a CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from slime_models.transfer import fingerprint
from slime_models.transfer.kernels.triton_kernels import row_sums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("n_rows", [0, 1, 7, 8, 19])
def test_sums_of_rows_are_those_of_operators(n_rows: int) -> None:
    info = torch.iinfo(torch.int64)
    words = torch.randint(info.min, info.max, (n_rows, 512), device=DEVICE)
    weights = fingerprint._word_weights(DEVICE)
    wanted = fingerprint._row_sums(words, weights, torch.empty_like(words).view(-1))
    assert torch.equal(row_sums(words, weights), wanted)


def test_an_empty_row_of_words_is_nothing() -> None:
    weights = fingerprint._word_weights(DEVICE)
    assert row_sums(torch.zeros(3, 512, dtype=torch.int64, device=DEVICE), weights).tolist() == [0, 0, 0]
