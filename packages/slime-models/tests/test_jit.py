"""Compiling with and without a folder to keep what was compiled in."""

from __future__ import annotations

import pytest
from slime_models.jit import compiled


def test_a_folder_that_cannot_be_written_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[tuple[int, bool]] = []

    def make(itemsize: int, *, cache: bool) -> str:
        tried.append((itemsize, cache))
        if cache:
            raise RuntimeError("cannot cache function 'norm': no locator available")
        return "compiled"

    with caplog.at_level("INFO"):
        assert compiled(make, 2) == "compiled"
    assert tried == [(2, True), (2, False)]
    assert "no locator available" in caplog.text
