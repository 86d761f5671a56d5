"""Who has which pages: by hand, and against a plain account of who holds what."""

from __future__ import annotations

import random

import pytest
from slime_torch.storage.page_table import PageTable


def rows(table, slots):
    return table.rows(slots).tolist()


def test_slots_get_pages_as_they_grow_and_shorter_ones_are_filled_up_with_page_0():
    table = PageTable(4, 10)
    table.grow(0, 4)
    table.grow(1, 5)
    assert rows(table, 2) == [[1, 0], [2, 3]]
    table.grow(0, 5)
    assert rows(table, 3) == [[1, 4], [2, 3], [0, 0]]
    assert (table.n_free, table.end) == (6, 5)
    assert [table.missing(0, length) for length in (8, 9, 16, 17)] == [0, 1, 2, 3]


def test_full_pages_of_a_prompt_are_shared_and_go_with_their_last_reader():
    table = PageTable(4, 10)
    table.grow(0, 11)
    assert table.share(0, 1, 6) == (2, 4)  # tokens 4 and 5 are to be copied into a page of its own
    assert table.share(0, 2, 8) is None
    assert rows(table, 3) == [[1, 2, 3], [1, 4, 0], [1, 2, 0]]
    table.release(0)
    assert table.n_free == 7  # page 3 alone is free again
    table.release(2)
    assert table.n_free == 8
    table.release(1)
    assert (table.n_free, rows(table, 3)) == (10, [[], [], []])
    table.grow(0, 16)
    assert table.end == 5  # used again, before any new one


def test_a_slot_that_moves_keeps_its_pages():
    table = PageTable(2, 4)
    table.grow(0, 1)
    table.grow(1, 4)
    table.release(0)
    table.move(1, 0)
    assert rows(table, 2) == [[2, 3], [0, 0]]
    assert table.n_free == 2


@pytest.mark.parametrize("seed", range(20))
def test_after_any_calls_each_page_is_free_or_held_and_only_full_pages_of_one_content_are_shared(seed):
    """A page that is shared holds the same tokens for all; each slot is told apart by what would be written for it."""
    drawn = random.Random(seed)
    table, held = PageTable(4, 30), {}  # slot -> what would be read of it
    memory = {}  # (page, place) -> token
    n_tokens = 0

    def write(slot, since):
        for position in range(since, len(held[slot])):
            memory[int(table.rows(8)[slot][position // 4]), position % 4] = held[slot][position]

    for _ in range(300):
        slot, source = drawn.sample(range(8), 2)
        action = drawn.choice(["grow", "grow", "release", "share", "move"])
        if action == "grow":
            length = len(held.get(slot, ())) + drawn.randint(1, 5)
            if table.missing(slot, length) <= table.n_free:
                since = len(held.setdefault(slot, []))
                table.grow(slot, length)
                held[slot] += range(n_tokens, n_tokens + length - since)
                n_tokens += length - since
                write(slot, since)
        elif action == "release":
            table.release(slot)
            held.pop(slot, None)
        elif slot not in held and source in held:
            if action == "move":
                table.move(source, slot)
                held[slot] = held.pop(source)
            elif table.n_free:
                length = drawn.randint(1, len(held[source]))
                copied = table.share(source, slot, length)
                held[slot] = held[source][:length]
                if copied is not None:
                    for place in range(4):
                        memory[copied[1], place] = memory.get((copied[0], place))
        pages = table.rows(8)
        for each, tokens in held.items():
            read = [memory[int(pages[each][i // 4]), i % 4] for i in range(len(tokens))]
            assert read == tokens
        used = {int(pages[each][i]) for each, tokens in held.items() for i in range(-(-len(tokens) // 4))}
        assert 0 not in used and table.n_free == 30 - len(used)
