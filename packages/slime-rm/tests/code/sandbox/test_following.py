"""Following a program whose first output, or whose end, is there before the word that it has started."""

from __future__ import annotations

import os
import threading

import pytest
from slime_rm.code.sandbox.running import SandboxError, follow


def followed(*reports: bytes, output: bytes, after_s: float = 0.0):
    """Follow what wrote `output` at once, and each of `reports` so much later; at most 1,000 bytes are allowed."""
    (read, write), (reported, report), (_, feed) = os.pipe(), os.pipe(), os.pipe()
    os.write(write, output)

    def tell():
        for each in reports:
            os.write(report, each)
        os.close(report)

    timer = threading.Timer(after_s, tell)
    timer.start()
    try:
        return follow(
            lambda: os.close(write), reported, {read: 1000}, feed=os.fdopen(feed, "wb"), stdin=b"", wall_s=5.0
        )
    finally:
        timer.join()
        os.close(read)
        os.close(reported)


READY = b'{"ready": true}\n'


def test_a_flood_that_is_there_before_the_word_is_output_of_a_program():
    found = followed(READY, output=b"x" * 5000, after_s=0.3)
    assert found.ending == "output"
    assert list(found.output.values()) == [b"x" * 1000]


def test_a_program_that_is_killed_for_its_memory_before_the_word_has_run():
    assert followed(b'{"memory": true}\n', output=b"").ending == "memory"


@pytest.mark.parametrize("reports", [(), (b'{"error": "no namespaces"}\n',)])
def test_output_without_the_word_is_none_of_a_program(reports):
    with pytest.raises(SandboxError, match=r"nothing was run"):
        followed(*reports, output=b"y" * 5000, after_s=0.1)


def test_an_end_that_is_told_with_the_word_is_an_end():
    found = followed(READY, b'{"status": 0}\n', output=b"done")
    assert (found.ending, found.code, *found.output.values()) == ("exit", 0, b"done")
