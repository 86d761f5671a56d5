"""Work over bytes on several threads: each byte once, the same bytes, and no workers beside the threads."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slime_models.transfer import threads as module
from slime_models.transfer.threads import PlainCopies, copy_all, on_threads, parts_of

NUMBERS = torch.arange(3)


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


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 200))
def test_what_is_copied_past_the_caches_is_what_was_asked_for(begin, shift, size):
    """From and to any address; and no byte beside it."""
    pytest.importorskip("numba")
    source = torch.randint(0, 256, (300,), dtype=torch.uint8)
    memory = torch.full((300,), 7, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MANY_BYTES", 0)
        patch.setattr(module, "_PART_BYTES", 90)
        copy_all([(memory[begin : begin + size], source[shift : shift + size])])
    wanted = torch.full((300,), 7, dtype=torch.uint8)
    wanted[begin : begin + size] = source[shift : shift + size]
    assert torch.equal(memory, wanted)


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


def test_copies_that_were_put_off_are_seen_by_whatever_follows(two_threads):
    """Each line after a copy would find other numbers, had the copy not been made."""
    ones, twos, zeros = torch.ones(6), torch.full((6,), 2.0), torch.zeros(6)
    first, second, third, fourth = (torch.zeros(6) for _ in range(4))
    with torch.no_grad(), PlainCopies():
        first.copy_(ones)
        read = first.sum()
        first.copy_(twos)
        second.copy_(first)  # from what waits
        first.copy_(zeros)  # over what is to be read
        third.copy_(ones)
        third[2:4].copy_(twos[:2])  # over a part of it
        fourth.copy_(ones)
        taken = fourth[torch.tensor([1, 2])]  # no view
        fourth[:3].copy_(fourth[3:])
        fourth.data.view(2, 3)[1].copy_(twos[:3])
        fourth += 1
    assert read == 6
    assert first.tolist() == [0.0] * 6
    assert second.tolist() == [2.0] * 6
    assert third.tolist() == [1, 1, 2, 2, 1, 1]
    assert taken.tolist() == [1, 1]
    assert fourth.tolist() == [2, 2, 2, 3, 3, 3]


def test_copies_are_put_off_to_be_made_together(two_threads, monkeypatch):
    """A weight loader narrows, looks at sizes, and copies; a batch is bounded."""
    made = []
    monkeypatch.setattr(
        module, "copy_all", lambda pairs: made.append([target.numel() for target, _ in pairs])
    )
    monkeypatch.setattr(module, "_BATCH_BYTES", 100)
    stacked, source = torch.nn.Parameter(torch.zeros(9, 2)), torch.ones(18)
    others = [(torch.zeros(size), torch.ones(size)) for size in (20, 7, 3)]
    with torch.no_grad(), PlainCopies():
        for start in (0, 3, 6):
            part = stacked.data.narrow(0, start, 3)
            assert part.shape == (3, 2)
            assert part.size() == source.view(9, 2)[start : start + 3].size()
            part.copy_(source.view(9, 2)[start : start + 3])
        assert made == []
        for target, ones in others:
            target.copy_(ones)
    assert made == [[6, 6, 6, 20], [7, 3]]


@pytest.mark.parametrize(
    ("does", "only_copied"),
    [
        (lambda target, source: target[1:].narrow(0, 0, 2).copy_(source.data[:2]), True),
        (lambda target, source: target.double().copy_(source), False),
        (lambda target, source: target[:2].fill_(0), True),
        (lambda target, source: target.data.zero_(), True),
        (lambda target, source: NUMBERS.tolist(), True),
        (lambda target, source: source.tolist(), False),
        (lambda target, source: target.fill_(source[0]), False),
        (lambda target, source: target.fill_(source[0].item()), False),
        (lambda target, source: target.copy_(source[0]), False),
        (lambda target, source: target.copy_(source * 2), False),
        (lambda target, source: target.copy_(source[torch.tensor([1, 0, 2])]), False),
        (lambda target, source: setattr(target, "data", source), False),
        (lambda target, source: source.data_ptr(), False),
        (lambda target, source: torch.where(target > 0, target, source), False),
    ],
)
def test_whether_all_was_copying_is_said(does, only_copied):
    target, source, other = torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.float64)
    with torch.no_grad(), PlainCopies() as copies:
        other.copy_(source)  # to another dtype
        does(target, source)
        target.shape, source.numel()
    assert copies.only_copied == only_copied
    if only_copied:
        assert copies.n_copied == 3 + 2 * bool(target.any())


def test_copies_that_were_put_off_are_made_although_the_loader_fails():
    target = torch.zeros(3)
    with pytest.raises(ValueError, match="no more"), torch.no_grad(), PlainCopies():
        target.copy_(torch.ones(3))
        raise ValueError("no more")
    assert target.tolist() == [1, 1, 1]
