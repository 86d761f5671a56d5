"""Lines of a file that grows, is cut, replaced and removed while it is read."""

from __future__ import annotations

import os

import pytest
from slime_core.rundir.line_tail import LineTail


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines"


def add(path, text):
    with path.open("a") as file:
        file.write(text)


def test_each_line_comes_once_and_half_a_line_when_it_is_whole(path):
    tail = LineTail(path, most_bytes=1000)
    assert tail.read() == (False, [])
    assert tail.changed_at is None
    add(path, "a\nb\nhal")
    assert tail.read() == (True, [b"a", b"b"])
    assert tail.changed_at == path.stat().st_mtime
    assert tail.read() == (False, [])
    add(path, "f\n")
    assert tail.read() == (False, [b"half"])
    assert not tail.passed_over


def test_half_a_line_that_is_cut_off_before_more_comes_is_never_seen(path):
    """As a resumed run does with what a kill has left, here between two looks."""
    tail = LineTail(path, most_bytes=1000)
    add(path, "a\nhalf of a line that was long")
    assert tail.read() == (True, [b"a"])
    os.truncate(path, 2)
    add(path, "header\nb\nand many more\n")
    assert tail.read() == (False, [b"header", b"b", b"and many more"])


def test_a_file_that_is_replaced_shortened_or_removed_begins_anew(path):
    tail = LineTail(path, most_bytes=1000)
    add(path, "a\nb\n")
    assert tail.read() == (True, [b"a", b"b"])
    other = path.with_name("other")
    other.write_text("a\nb\nc\n")
    other.replace(path)
    assert tail.read() == (True, [b"a", b"b", b"c"])
    os.truncate(path, 2)
    assert tail.read() == (True, [b"a"])
    path.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])
    add(path, "z\n")
    assert tail.read() == (True, [b"z"])


def test_of_what_is_too_much_the_last_whole_lines_are_read(path):
    tail = LineTail(path, most_bytes=10)
    add(path, "".join(f"line {n}\n" for n in range(10)))  # lines of 7 bytes
    assert tail.read() == (True, [b"line 9"])
    assert tail.passed_over
    add(path, "x\n")
    assert tail.read() == (False, [b"x"])
    add(path, "".join(f"line {n}\n" for n in range(10)))
    assert tail.read() == (False, [b"line 9"])


def test_a_folder_in_its_place_is_no_file(path):
    path.mkdir()
    assert LineTail(path, most_bytes=10).read() == (False, [])
