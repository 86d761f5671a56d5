"""Checks of the settings of sglang-router."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slime_core.config.settings import Settings
from slime_core.errors import Problem

from slime_sglang.settings.section import FleetSection


def router_setting(fleet: FleetSection) -> str:
    """Return the name of the setting that asks for a router."""
    return "fleet.router_policy" if fleet.router_policy is not None else "fleet.sglang_router_ip"


def router_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse a router that is not there, that two settings choose, or whose requests would meet KV caches of other weights."""
    fleet = settings.section(FleetSection)
    if fleet.has_router and settings.train.update_weights_in_flight == "keep":
        yield Problem(
            router_setting(fleet),
            "it with update_weights_in_flight keep",
            "no router, or recompute or continue",
            "requests through it do not say which weights they are for, and would meet prefixes of earlier ones",
        )
    if fleet.sglang_router_ip is not None and fleet.sglang_router_port is None:
        yield Problem("fleet.sglang_router_port", "nothing beside sglang_router_ip", "the router's port")
    if fleet.sglang_router_port is not None and not fleet.has_router:
        yield Problem(
            "fleet.sglang_router_port",
            "it without a router",
            "router_policy, which starts one, or sglang_router_ip, which joins one",
        )
    if fleet.router_policy is not None and fleet.sglang_router_ip is not None:
        yield Problem(
            "fleet.router_policy",
            "it beside sglang_router_ip",
            "one of them",
            "a joined router has its own policy",
        )
    elif fleet.router_policy is not None and importlib.util.find_spec("sglang_router") is None:
        yield Problem(
            "fleet.router_policy",
            f"{fleet.router_policy!r} and no package sglang-router",
            "it",
            "install the extra 'slime-sglang[router]', or drop the policy: engines get requests without a router, too",
        )
