"""Settings of the engine `sglang`."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from slime_core.config.base import SectionModel

#: Weight transports that the engine receives by, best first.
TRANSPORTS = ("memory", "distributed", "disk-delta", "disk")

#: What completions hold where it is needed, by its name in `Completion.metadata`.
ROUTED_EXPERTS = "routed_experts"

#: Arguments of SGLang's that follow from slime's own settings, and where those are.
DERIVED = {
    "model_path": "sglang.model_path, or model.hf_checkpoint",
    "model": "sglang.model_path, or model.hf_checkpoint",
    "quantization": "nothing: the config.json of sglang.model_path says it",
    "host": "nothing: the server listens on this host alone",
    "port": "nothing: a free one is taken",
    "custom_weight_loader": "nothing: updates are checked by slime's own",
}

Count = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]
RouterPolicy = Literal["random", "round_robin", "power_of_two", "cache_aware", "consistent_hashing", "manual"]


class SglangSection(SectionModel):
    """An SGLang server (`--rollout-engine sglang`)."""

    model_path: Path | None = None
    """Hugging Face folder that servers start from, where it is not the trainer's: its model quantised, as `slime convert
    quantize` writes it. Updates are quantised as its config.json says."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype of the server, and storage dtype of what is not quantised; `auto` is the trainer's (`bf16`, `fp16`)."""
    server_args: dict[str, Any] = {}
    """SGLang's own arguments by name, for what slime has no setting of; each can also be given as a flag,
    `--sglang-mem-fraction-static 0.8`. True stands for one without a value."""
    server_concurrency: Count = 512
    """Most requests that are under way at the server; further ones wait here."""
    start_timeout_s: Seconds = 900
    """Deadline of the server's start, seconds."""
    request_timeout_s: Seconds = 3600
    """Deadline of one generation request, seconds."""
    control_timeout_s: Seconds = 300
    """Deadline of every other call to the server, seconds; loading an update is one."""
    request_retries: Annotated[int, Ge(0)] = 3
    """How often a request is sent again that found no connection, or a server that was not ready."""
    pause_mode: Literal["retract", "abort"] = "retract"
    """What becomes of requests that are under way when weights arrive: computed anew from their tokens, or ended."""
    staging_dir: Path = Path("/dev/shm")
    """Folder in shared memory where an update lies, whole, until the server has checked and loaded it."""


class FleetSection(SectionModel):
    """Several SGLang servers (`--rollout-engine sglang`), and what becomes of one that fails."""

    rollout_num_gpus: Count | None = None
    """GPUs of all engines together, one engine for each `rollout_num_gpus_per_engine` of them; without GPUs the number
    of engines. One engine when not given."""
    rollout_num_gpus_per_engine: Count = 1
    """GPUs of one engine."""
    rollout_external_engine_addrs: list[str] = []
    """Servers that run already, `host:port` each: they are joined, and neither started nor stopped."""
    router_policy: RouterPolicy | None = None
    """Have sglang-router spread the requests, by this policy (`slime-sglang[router]`). When not given, no router runs:
    each request goes to the engine with the fewest, and those of one session to one engine."""
    sglang_router_ip: str | None = None
    """Host of a router that runs already and is joined; it chooses by its own policy."""
    sglang_router_port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the router; a free one when the run starts it."""
    use_fault_tolerance: bool = False
    """Go on when an engine ends or hangs: others go on with its requests, from the tokens that arrived, and a new one
    takes its place."""
    rollout_health_check_interval: Seconds = 30
    """Seconds between two health checks of an engine under `use_fault_tolerance`; one that ends or fails at a request is
    noticed at once."""
    rollout_health_check_timeout: Seconds = 30
    """Deadline of a health check, seconds; an engine that misses it is killed."""
    rollout_health_check_first_wait: Annotated[float, Ge(0)] = 0
    """Seconds before the first interval of an engine that has just started."""
    rollout_engine_restarts: Annotated[int, Ge(0)] = 3
    """How often an engine is started again before it is given up; the run ends when all are."""

    @property
    def n_engines(self) -> int:
        """Number of engines."""
        if self.rollout_external_engine_addrs:
            return len(self.rollout_external_engine_addrs)
        return (self.rollout_num_gpus or self.rollout_num_gpus_per_engine) // self.rollout_num_gpus_per_engine

    @property
    def is_plain(self) -> bool:
        """Whether one engine does, without a fleet around it."""
        return self.n_engines == 1 and not (
            self.rollout_external_engine_addrs or self.has_router or self.use_fault_tolerance
        )

    @property
    def has_router(self) -> bool:
        """Whether a router is started or joined."""
        return self.router_policy is not None or self.sglang_router_ip is not None


@functools.cache
def known_arguments() -> frozenset[str]:
    """Return the names of all arguments of SGLang's server, of the release that this package is written for.

    They are in `sglang_flags.json`, made by `scripts/sglang_flags.py`; a test compares it with what is installed.
    """
    text = (files("slime_sglang") / "sglang_flags.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))
