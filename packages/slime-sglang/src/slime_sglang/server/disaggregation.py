"""Arguments and environment of the servers of prefill and decode engines (prefill-decode disaggregation).

SGLang transfers the KV cache by mooncake, or by the backend that `--sglang-disaggregation-transfer-backend` names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from slime_sglang.server.command import Device

#: Environment variable with the address of its machine that a server gives those with which it exchanges caches.
HOST_ADDRESS = "SGLANG_HOST_IP"
#: Transfer backend of the KV cache where the user names none. Without a GPU it is TCP: mooncake's own choice is RDMA.
DEFAULT_BACKENDS: Mapping[Device, str] = {"cuda": "mooncake", "cpu": "mooncake_tcp"}


def disaggregation_arguments(
    role: str, given: Mapping[str, Any], *, bootstrap_port: int, device: Device
) -> dict[str, Any]:
    """Return SGLang's arguments of a prefill or decode engine; `given` are the user's, which win.

    Args:
        role: `prefill` or `decode`.
        given: arguments of the run and of the group.
        bootstrap_port: of a prefill engine, where decode engines find it.
        device: what the server runs on.
    """
    own: dict[str, Any] = {"disaggregation_transfer_backend": DEFAULT_BACKENDS[device]}
    if device == "cpu":  # not the pool of memory that SGLang wants 10 GiB to spare for
        own["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    derived: dict[str, Any] = {"disaggregation_mode": role}
    if role == "prefill":
        derived["disaggregation_bootstrap_port"] = bootstrap_port
    return {**own, **given, **derived}


def disaggregation_environment(*, host: str, request_timeout_s: float, device: Device) -> dict[str, str]:
    """Return the variables to add to the environment of such an engine's server at an address, but for those that are set.

    SGLang gives a request up when its other engine has not got it within 300 s, which a queue may take: here the deadline
    of requests decides. Without a GPU two ways of transfer are switched off that wait for CUDA events (SGLang 0.5.23,
    disaggregation/prefill.py): the cache of a prompt is sent once its prefill is complete, by every context-parallel rank,
    of which there is one.
    """
    seconds = str(math.ceil(request_timeout_s))
    wanted = {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": seconds,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": seconds,
        HOST_ADDRESS: host,
    }
    if device == "cpu":
        wanted["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
        wanted["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}
