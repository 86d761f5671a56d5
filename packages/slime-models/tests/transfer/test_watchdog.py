"""The environment in which groups of NCCL are made."""

from __future__ import annotations

import os

import pytest
from slime_models.transfer.ranks.group import without_watchdog

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("before", [None, "1"])
def test_the_watchdog_is_off_while_a_group_is_made_and_as_before_afterwards(monkeypatch, before):
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(RuntimeError, match="no GPU"), without_watchdog():
        assert os.environ[NAME] == "0"
        raise RuntimeError("no GPU")
    assert os.environ.get(NAME) == before
