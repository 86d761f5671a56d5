"""Joining a cluster."""

from __future__ import annotations

import pytest
from slime_core.errors import TrainerError
from slime_ray.launcher import set_environment


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "Connection refused"), ("nonsense", "invalid literal for int")]
)
def test_address_where_no_cluster_is_is_refused_at_once(monkeypatch, address, why):
    set_environment()
    from slime_ray.cluster import connect  # imports Ray

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(TrainerError, match=f"RAY_ADDRESS: found '{address}', where no .* joined: .*{why}"):
        connect(1)
