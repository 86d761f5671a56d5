"""Requests over HTTP, and this host."""

from slime_compat.views.running.absent import lacking
from slime_compat.views.running.host import (
    find_available_port,
    get_host_info,
    get_rollout_num_engines,
    is_port_available,
)
from slime_compat.views.running.http import get, init_http_client, post

__all__ = [
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
]
__getattr__ = lacking(
    __name__,
    {
        "run_router": "the engine balances its servers itself; use --rollout-engine sglang",
        "terminate_process": "processes of a run end with it; use subprocess",
    },
)
