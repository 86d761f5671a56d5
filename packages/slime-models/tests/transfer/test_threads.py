"""Work over bytes on several threads: each byte once, the same bytes, and no workers beside the threads."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slime_models.transfer import threads as module
from slime_models.transfer.threads import PlainCopies, copy_all, on_threads, parts_of


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 4), st.integers(4, 20))
def test_each_byte_is_in_one_part_and_no_part_is_too_large(sizes, unit, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_BYTES", most)
        parts = parts_of(sizes, unit=unit)
    pieces = [piece for part in parts for piece in part]
    covered = {owner: [] for owner in range(len(sizes))}
    for piece in pieces:
        assert piece.start % unit == 0
        covered[piece.owner] += range(piece.start, piece.end)
    assert covered == {owner: list(range(size)) for owner, size in enumerate(sizes)}
    assert {piece.owner for piece in pieces} == set(range(len(sizes)))
    assert all(sum(piece.end - piece.start for piece in part) <= most for part in parts)


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_work_goes_on_side_by_side_in_its_order(two_threads):
    both = threading.Barrier(2, timeout=60)

    def meet(number):
        both.wait()  # only ends where two are at it
        return number * 10

    assert on_threads(meet, [1, 2]) == [10, 20]
    assert on_threads(lambda number: number, []) == []


def test_the_error_of_one_is_raised(two_threads):
    def fail(number):
        raise ValueError(f"no {number}")

    with pytest.raises(ValueError, match="no 1"):
        on_threads(fail, [1, 2])


def pairs():
    """(target, source) of several kinds: plain, empty, scalar, not contiguous, of another dtype."""
    sources = [
        torch.arange(1000, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor(2.5),
        torch.arange(12.0).reshape(3, 4).T,
        torch.nn.Parameter(torch.ones(5)),
        torch.arange(6),
    ]
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.float32, torch.float64]
    return [(torch.zeros(s.shape, dtype=d), s) for s, d in zip(sources, dtypes, strict=True)]


def test_what_is_copied_is_what_torch_copies(two_threads, monkeypatch):
    monkeypatch.setattr(module, "_PART_BYTES", 300)
    made = pairs()
    copy_all(made)
    for target, source in made:
        assert target.equal(source.to(target.dtype))
        assert not target.requires_grad
    copy_all([])


def test_within_plain_copies_torch_copies_what_it_would():
    made = pairs()
    table = torch.zeros(4, 6)
    with torch.no_grad(), PlainCopies():
        for target, source in made:
            assert target.copy_(source) is target
        table.narrow(1, 2, 3).copy_(torch.ones(4, 3))  # the target is not contiguous
        table[3].copy_(torch.tensor(7.0))  # and this one is wider than its source
    assert all(target.equal(source.to(target.dtype)) for target, source in made)
    assert table[:3].equal(torch.tensor([0.0, 0, 1, 1, 1, 0]).repeat(3, 1))
    assert table[3].equal(torch.full((6,), 7.0))
    weight = torch.nn.Parameter(torch.zeros(2))
    with PlainCopies():
        (torch.zeros(2).copy_(weight * 3)).sum().backward()  # where gradients are wanted, they are as ever
    assert weight.grad.tolist() == [3.0, 3.0]
