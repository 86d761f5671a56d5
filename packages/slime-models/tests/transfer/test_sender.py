"""`WeightSender`: choosing a transport, and quantising what is sent."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.transfer.sender import WeightSender

from .updates import plan_of, send


def test_an_unknown_transport_is_refused_by_name():
    wanted = r"version 7: slime.transports: no plugin is named 'pigeon'; installed: disk, disk-delta, distributed, memory"
    with pytest.raises(WeightSyncError, match=wanted):
        send(WeightSender(asyncio.to_thread, Registry()), plan_of("pigeon", None), {})
