"""The sections `sglang` and `fleet` of the settings, and the arguments of SGLang's server. Imports neither torch nor sglang."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from slime_core.config.base import Count, Index, Seconds, SectionModel
from slime_core.errors import Problem
from slime_core.protocols import EngineCapabilities
from slime_models.groups import OWN_TRANSPORTS

#: The engine.
OURS = "slime-sglang/sglang"
#: Key of `Completion.metadata` for the experts of each token.
ROUTED_EXPERTS = "routed_experts"
#: What the engine can do.
CAPABILITIES = EngineCapabilities(
    transports=OWN_TRANSPORTS,
    other_transports=True,
    images=True,
    reports_load=True,
    completions=frozenset({ROUTED_EXPERTS}),
)

#: Why encoder engines are refused.
WHY_NO_ENCODERS = "engines that only encode images have not been run here"

#: Arguments of SGLang that slime sets itself, and the settings that they follow from.
DERIVED = {
    "model_path": "sglang.model_path, or model.hf_checkpoint",
    "model": "sglang.model_path, or model.hf_checkpoint",
    "quantization": "nothing: the config.json of sglang.model_path says it",
    "host": "nothing: the server listens on its host alone, or where a launcher's machines reach it",
    "port": "nothing: a free one is taken",
    "custom_weight_loader": "nothing: updates are checked by slime's own",
    "config": "nothing: each argument is given by itself",
    **dict.fromkeys(("api_key", "admin_api_key"), "nothing: the run makes a key for its servers"),
    "tp_size": "fleet.rollout_num_gpus_per_engine",
    "tensor_parallel_size": "fleet.rollout_num_gpus_per_engine",
    "gpu_id_step": "nothing: the GPUs of an engine lie in a row",
    "disaggregation_mode": "fleet.prefill_num_servers, or groups of fleet.sglang_config",
    "disaggregation_bootstrap_port": "nothing: a free one is taken",
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"), "nothing: they follow from where the launcher has room"
    ),
    **dict.fromkeys(
        ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"),
        "nothing: the server listens to plain HTTP",
    ),
}
#: Arguments of engines that only encode images, or leave that to others.
_ENCODER_ARGUMENTS = ("encoder_only", "language_only")
#: Names of the arguments that say how ranks share a model: by layers, by requests that have the whole attention, by experts.
_STAGES, ATTENTION_GROUPS = (
    ("pp_size", "pipeline_parallel_size"),
    ("attn_dp_size", "attention_data_parallel_size"),
)
EXPERT_GROUPS = ("ep_size", "expert_parallel_size")
#: Arguments that make servers within a server, but with the one that divides attention among its ranks instead.
REPLICAS, DIVIDED = ("dp_size", "data_parallel_size"), "enable_dp_attention"

#: Numbers among the arguments that slime reckons with itself: the least whole number that each may be, None for a share of 1.
_NUMBERS = {
    **dict.fromkeys((*_STAGES, *ATTENTION_GROUPS, *EXPERT_GROUPS, *REPLICAS, "max_total_tokens"), 1),
    "base_gpu_id": 0,
    "mem_fraction_static": None,
}
#: Arguments that bypass the API key of a server, and the values that do not.
_KEY_BYPASSES = {
    "tokenizer_worker_num": "1",
    **dict.fromkeys(("grpc_port", "grpc_mode", "smg_grpc_mode"), "nothing"),
}

_MOVED = "experts move, or are there twice, and updates would not reach each where it is"
_KEPT = "what it keeps of the KV cache outlives the weights that it was computed with"
#: Arguments under which a server may answer by other weights than those of its last update -> (values that do not matter, why).
_AGAINST_UPDATES = {
    "enable_eplb": (("None", "False"), _MOVED),
    "ep_num_redundant_experts": (("None", "0"), _MOVED),
    "init_expert_location": (("None", "trivial"), _MOVED),
    "hicache_storage_backend": (("None",), _KEPT),
    "enable_lmcache": (("None", "False"), _KEPT),
}

RouterPolicy = Literal["random", "round_robin", "power_of_two", "cache_aware", "consistent_hashing", "manual"]


class SglangSection(SectionModel):
    """An SGLang server (`--rollout-engine sglang`)."""

    reads = ("model_path",)

    model_path: Path | None = None
    """Hugging Face folder that servers start from, where it is not the trainer's: its model quantised, as `slime convert
    quantize` writes it. Updates are quantised as its config.json says."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype of the server, and storage dtype of what is not quantised; `auto` is the trainer's (`bf16`, `fp16`)."""
    server_args: dict[str, Any] = {}
    """SGLang's own arguments by name, for what slime has no setting of; each can also be given as a flag,
    `--sglang-mem-fraction-static 0.8`. True stands for one without a value."""
    server_concurrency: Count = 512
    """Most requests in flight at the server; further ones wait in the run's process."""
    start_timeout_s: Seconds = 900
    """Deadline of the server's start, seconds."""
    request_timeout_s: Seconds = 3600
    """Deadline of one generation request, seconds."""
    control_timeout_s: Seconds = 300
    """Deadline of every other call to the server, seconds; loading an update is one."""
    request_retries: Index = 3
    """How often a request is sent again that found no connection, or a server that was not ready."""
    staging_dir: Path = Path("/dev/shm")
    """Folder in shared memory where an update is staged until the servers have checked and loaded it."""


class FleetSection(SectionModel):
    """Several SGLang servers (`--rollout-engine sglang`): their GPUs, router and fault tolerance."""

    reads = ("sglang_config", "rollout_external_key_file")

    rollout_num_gpus: Count | None = None
    """GPUs of all engines together, one engine for each `rollout_num_gpus_per_engine` of them; without GPUs the number
    of ranks. One engine when not given, or the trainer's GPUs under `--colocate` with launcher `ray`; with `sglang_config`, what
    the file adds up to."""
    rollout_num_gpus_per_engine: Count = 1
    """GPUs of one engine, its tensor-parallel ranks, or with `--sglang-pp-size` those of all its pipeline stages; without GPUs
    the number of ranks."""
    sglang_config: Path | None = None
    """YAML file with the models that the run serves and the groups of engines that serve them: groups with arguments of
    their own, models that are not trained (`served:NAME` for rewards), and GPUs that are left unused."""
    prefill_num_servers: Index = 0
    """Engines that only prefill, and transfer the KV cache to the others, which only decode; 0 has every engine do both.
    `sglang_config` says it by groups."""
    rollout_external_engine_addrs: list[str] = []
    """External servers, `host:port` each: they run already, are joined, and are neither started nor stopped."""
    rollout_external_key_file: Path | None = None
    """File with the API key of external servers and of a router that is joined (SGLang's `--api-key`). Servers that the run
    starts ask for a key that it makes."""
    router_policy: RouterPolicy | None = None
    """Have sglang-router balance the requests, by this policy (`slime-sglang[router]`). When not given, no router runs: each
    request goes to the engine with the fewest, and those of one session to one engine."""
    sglang_router_ip: str | None = None
    """Host of a router that runs already and is joined; it chooses by its own policy."""
    sglang_router_port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the router; a free one when the run starts it."""
    use_fault_tolerance: bool = False
    """Go on when an engine exits or hangs: others continue its requests from the tokens that arrived, and a new one takes
    its place."""
    rollout_health_check_interval: Seconds = 30
    """Seconds between two health checks of an engine under `use_fault_tolerance`; one that exits or fails at a request is
    noticed at once."""
    rollout_health_check_timeout: Seconds = 30
    """Deadline of a health check, seconds, at least 2; an engine that misses it is killed. External servers give up after 20 s, or
    their own SGLANG_HEALTH_CHECK_TIMEOUT, if that is sooner."""
    rollout_health_check_first_wait: Annotated[float, Ge(0), Le(3e8)] = 0
    """Seconds before the first interval of an engine that has just started."""
    rollout_engine_restarts: Index = 3
    """How often an engine is started again under `use_fault_tolerance` before it is given up; the run ends when all are."""

    @property
    def health_timeout_s(self) -> float | None:
        """Deadline of the health checks of each engine, seconds; None where engines are not watched."""
        return self.rollout_health_check_timeout if self.use_fault_tolerance else None

    @property
    def has_router(self) -> bool:
        """Whether a router is started or joined."""
        return self.router_policy is not None or self.sglang_router_ip is not None


@functools.cache
def known_arguments() -> frozenset[str]:
    """Return the names of all arguments of SGLang's server, of the release that this package is written for.

    They are in `sglang_flags.json`, made by `scripts/sglang_flags.py`; a test compares it with what is installed.
    """
    text = (files("slime_sglang.settings") / "sglang_flags.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))


def number_of(arguments: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return a whole number that `argument_problems` has checked, by the first of its names that is given; 1 without."""
    return next((int(arguments[name]) for name in names if name in arguments), 1)


def pipeline_stages(arguments: Mapping[str, Any]) -> int:
    """Return how many pipeline stages a server has, by its arguments."""
    return number_of(arguments, _STAGES)


def refused_arguments() -> frozenset[str]:
    """Return the arguments that `argument_problems` refuses whatever their value."""
    return frozenset((*DERIVED, *_ENCODER_ARGUMENTS))


def _number_wanted(name: str, value: Any) -> str | None:
    """Return what a number that slime reckons with is to be; None where it is so, or slime does not reckon with it."""
    if name not in _NUMBERS:
        return None
    least, text = _NUMBERS[name], str(value)
    if least is not None:
        is_right = text.isascii() and text.isdecimal() and int(text) >= least
        return None if is_right else f"a whole number of at least {least}"
    try:
        return None if 0 < float(text) <= 1 else "a number above 0, and 1 at most"
    except ValueError:
        return "a number above 0, and 1 at most"


def update_problems(arguments: Mapping[str, Any], *, where: str) -> Iterator[Problem]:
    """Yield each argument of a server under which it may answer by other weights than those of its last update."""
    for name, (harmless, why) in _AGAINST_UPDATES.items():
        if str(arguments.get(name)) not in harmless:
            yield Problem(
                f"{where}.{name}",
                str(arguments[name]),
                "no such argument of a server whose weights are updated",
                why,
            )


def argument_problems(arguments: Mapping[str, Any], *, where: str) -> Iterator[Problem]:
    """Yield each argument that SGLang's server does not have, that slime sets itself or reckons with and is no number, or whose
    weights cannot be proven."""
    for name, value in arguments.items():
        if name in DERIVED:
            yield Problem(f"{where}.{name}", "an argument that slime gives the server itself", DERIVED[name])
        elif name in _ENCODER_ARGUMENTS:
            yield Problem(f"{where}.{name}", "it", "engines that do all of the work", WHY_NO_ENCODERS)
        elif name == "disaggregation_transfer_backend" and value == "fake":
            why = "decode engines would generate from a cache that nobody filled"
            yield Problem(f"{where}.{name}", "fake", "one that moves something: mooncake, for example", why)
        elif (wanted := _number_wanted(name, value)) is not None:
            yield Problem(f"{where}.{name}", str(value), wanted)
        elif name in REPLICAS and str(value) != "1" and not arguments.get(DIVIDED):
            wanted = f"{DIVIDED} beside it, or 1"
            yield Problem(
                f"{where}.{name}", str(value), wanted, "more servers are --rollout-num-gpus of more GPUs"
            )
        elif name in _KEY_BYPASSES and value and str(value) != _KEY_BYPASSES[name]:
            why = "it opens a way into the server that does not ask for the run's key"
            yield Problem(f"{where}.{name}", str(value), _KEY_BYPASSES[name], why)
        elif name not in known_arguments():
            near = difflib.get_close_matches(name, known_arguments(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield Problem(f"{where}.{name}", "no argument of SGLang's server", f"one that it has{hint}")
