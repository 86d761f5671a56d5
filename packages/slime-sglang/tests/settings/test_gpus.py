"""The GPUs of the servers of a run in one process, beside those that it sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from slime_core.errors import ConfigError
from slime_sglang.factory import _check_gpus


def test_gpus_are_counted_from_the_first_one_that_servers_get(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = SimpleNamespace(num_gpus=2)
    _check_gpus(two, base=2)
    with pytest.raises(ConfigError, match=r"2 from GPU 3 on \(--sglang-base-gpu-id\); wanted at most 4"):
        _check_gpus(two, base=3)
