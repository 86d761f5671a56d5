"""Hooks of slime-sglang. Imports neither torch nor sglang."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_core.config.derive import sends_images
from slime_core.config.sections import ModelSection, RolloutSection, TrainSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.no_trainer import NAMES as NO_TRAINER
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
from slime_core.served import wanted_models
from slime_core.weights import transport_problems, wanted_transport

from slime_sglang.apart import missing_for_mooncake, transfer_problems
from slime_sglang.key import read_key
from slime_sglang.layout import Layout, layout_of, problems_of, rank_problems
from slime_sglang.process import is_here
from slime_sglang.section import (
    ROUTED_EXPERTS,
    TRANSPORTS,
    FleetSection,
    SglangSection,
    argument_problems,
    known_arguments,
    refused_arguments,
)

if TYPE_CHECKING:
    from slime_core.build import BuildContext


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the sections `sglang` and `fleet`."""
    return [
        Section(
            "sglang",
            SglangSection,
            foreign=ForeignFlags(
                "server_args", known_arguments(), prefix="sglang_", refused=refused_arguments()
            ),
        ),
        Section("fleet", FleetSection, prefix=""),
    ]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse arguments and transports that are not there, and log-probs that are not of what is sampled from."""
    yield from argument_problems(settings.section(SglangSection).server_args, where="sglang.server_args")
    yield from _asked_problems(settings)
    rollout = settings.section(RolloutSection)
    if rollout.rollout_engine != "sglang":
        return
    fleet = settings.section(FleetSection)
    yield from _gpu_problems(fleet)
    if fleet.sglang_config is not None:
        yield from problems_of(fleet, checkpoint=settings.section(ModelSection).hf_checkpoint)
    yield from _apart_problems(settings)
    yield from _external_problems(fleet, settings.section(TrainSection))
    yield from _router_problems(fleet)
    yield from transport_problems(settings.section(TrainSection), "engine sglang", TRANSPORTS)
    for name, value, neutral, why in (
        ("rollout_top_p", rollout.rollout_top_p, 1.0, "reports log-probs from before top-p"),
        ("rollout_top_k", rollout.rollout_top_k, -1, "reports log-probs from before top-k"),
        ("rollout_min_new_tokens", rollout.rollout_min_new_tokens, 0, "forbids the tokens that would end it"),
    ):
        if value != neutral:
            yield Problem(
                f"rollout.{name}",
                str(value),
                str(neutral),
                f"SGLang {why}, and its log-probs would not be those of the policy that is trained; "
                "the engine torch has no such limit",
            )


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse models that are not there, a folder for servers that updates do not fit, and a router where routes are needed."""
    if build.section(RolloutSection).rollout_engine != "sglang":
        return
    yield from _built_problems(build)
    yield from _image_problems(build)
    fleet, folder = build.section(FleetSection), build.section(SglangSection).model_path
    if folder is not None:
        from slime_sglang.served_folder import served_problems

        yield from served_problems(build, folder)
    if fleet.has_router and ROUTED_EXPERTS in build.engine_needs:
        yield Problem(
            _router_of(fleet),
            "it in a run that needs the experts of each token",
            "no router",
            "sglang-router drops the question for them; without it requests are spread all the same",
        )
    if ROUTED_EXPERTS in build.engine_needs and _apart_layout(build.settings) is not None:
        yield Problem(
            "fleet.prefill_num_servers" if fleet.sglang_config is None else str(fleet.sglang_config),
            "prefill and decode engines in a run that needs the experts of each token",
            "regular engines",
            "SGLang hands over the cache, but not which experts the prompt's tokens passed",
        )


def _image_problems(build: BuildContext) -> Iterator[Problem]:
    """Refuse a model that sees no images, and a router, where prompts have some."""
    if not sends_images(build.settings):
        return
    from slime_models.checkpoint import read_config  # imports torch

    from slime_sglang.pictures import PLACEHOLDER

    if read_config(build.model_path).get(PLACEHOLDER) is None:
        yield Problem(
            "model.hf_checkpoint",
            f"{build.model_path}, whose config.json has no {PLACEHOLDER}, with data.multimodal_keys",
            "a model that sees images",
        )
    fleet = build.section(FleetSection)
    if fleet.has_router:
        yield Problem(
            _router_of(fleet),
            "it with data.multimodal_keys",
            "no router",
            "that sglang-router hands images on is not proven; without it requests are spread all the same",
        )
    if _apart_layout(build.settings) is not None:
        yield Problem(
            "fleet.prefill_num_servers" if fleet.sglang_config is None else str(fleet.sglang_config),
            "prefill and decode engines with data.multimodal_keys",
            "regular engines",
            "that both read the same images is not proven",
        )


def _built_problems(build: BuildContext) -> Iterator[Problem]:
    """Refuse models that are not there, or that their engines' ranks cannot share."""
    from slime_core.assemble import resolve_model  # imports numpy, and the next two torch
    from slime_models.checkpoint import read_config

    from slime_sglang.server import visible_device

    fleet = build.section(FleetSection)
    layout = layout_of(fleet, checkpoint=build.section(ModelSection).hf_checkpoint)
    if fleet.rollout_external_engine_addrs:
        return
    for number, model in enumerate(layout.models):
        where = f"{fleet.sglang_config}: sglang.{number}.model_path"
        is_own = model.model_path is None or layout.is_policy(model)
        try:
            path = build.model_path if is_own else resolve_model(str(model.model_path), build.registry)
        except ConfigError as error:
            yield from (replace(problem, where=where) for problem in error.problems)
            continue
        except DataError as error:
            yield Problem(where, repr(model.model_path), "a model that is there", str(error))
            continue
        if any(place.num_gpus > 1 for place in layout.places(model)):
            yield from rank_problems(layout, model, read_config(path), on_cpu=visible_device() == "cpu")
            if layout.is_policy(model) and build.section(SglangSection).model_path is not None:
                yield Problem(
                    "sglang.model_path",
                    f"it with several GPUs an engine of {model.name!r}",
                    "engines of one GPU",
                    "which part of quantised weights a rank holds is not proven",
                )


def _asked_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse `served:NAME` of a model that the run does not serve."""
    asked = wanted_models(settings)
    if not asked:
        return
    try:
        fleet = settings.section(FleetSection)
        layout = layout_of(fleet, checkpoint=settings.section(ModelSection).hf_checkpoint)
    except ConfigError:  # which is said already
        return
    is_served = settings.section(RolloutSection).rollout_engine == "sglang"
    known = [model.name for model in layout.others] if is_served else []
    for where, name in asked:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        wanted = f"served:{near[0]}" if near else " or ".join(f"served:{each}" for each in known)
        yield Problem(
            where,
            f"served:{name}, which the run does not serve",
            wanted or "the address of a server",
            "" if known else "models of the run are in --sglang-config, with --rollout-engine sglang",
        )


def _gpu_problems(fleet: FleetSection) -> Iterator[Problem]:
    """Refuse sums of GPUs that do not add up, and engines that nobody can start."""
    total, each = fleet.rollout_num_gpus, fleet.rollout_num_gpus_per_engine
    if total is not None and total % each and fleet.sglang_config is None:
        yield Problem(
            "fleet.rollout_num_gpus",
            f"{total} with rollout_num_gpus_per_engine {each}",
            f"a multiple of {each}",
            f"{total % each} would be left over",
        )
    n_engines, n_reading = (total or each) // each, fleet.prefill_num_servers
    if n_reading and fleet.sglang_config is not None:
        yield Problem(
            "fleet.prefill_num_servers",
            f"{n_reading} beside sglang_config",
            "one of them",
            "groups of the file say it by worker_type: prefill and worker_type: decode",
        )
    elif n_reading and n_reading >= n_engines and not fleet.rollout_external_engine_addrs:
        yield Problem(
            "fleet.prefill_num_servers",
            f"{n_reading} of {n_engines} engines",
            f"{n_engines - 1} at most" if n_engines > 1 else "2 engines at least",
            "one has to generate; --rollout-num-gpus says how many engines there are",
        )


def _apart_layout(settings: Settings) -> Layout | None:
    """Return the layout of a run whose prompts are read apart; None for any other."""
    fleet = settings.section(FleetSection)
    try:
        layout = layout_of(fleet, checkpoint=settings.section(ModelSection).hf_checkpoint)
    except ConfigError:  # which is said already
        return None
    if fleet.rollout_external_engine_addrs or not any(map(layout.is_apart, layout.models)):
        return None
    return layout


def _apart_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse prefill and decode engines without what moves the cache between them, or behind a router."""
    layout = _apart_layout(settings)
    if layout is None:
        return
    fleet = settings.section(FleetSection)
    where = "fleet.prefill_num_servers" if fleet.sglang_config is None else str(fleet.sglang_config)
    given = settings.section(SglangSection).server_args
    places = [place for model in layout.models for place in layout.places(model) if place.role != "regular"]
    missing = [transfer_problems({**given, **place.overrides}, where=where) for place in places]
    yield from next(filter(None, map(list, missing)), [])
    if fleet.has_router:
        yield Problem(
            _router_of(fleet),
            "it with prefill and decode engines",
            "no router",
            "sglang-router would pair them itself, which has not been run; without it requests are spread all the same",
        )


def _external_problems(fleet: FleetSection, train: TrainSection) -> Iterator[Problem]:
    """Refuse addresses that are none or that weights do not reach, and settings of engines that the run would start."""
    addresses = fleet.rollout_external_engine_addrs
    yield from _key_problems(fleet)
    for name, value in (
        ("rollout_num_gpus", fleet.rollout_num_gpus),
        ("sglang_config", fleet.sglang_config),
        ("prefill_num_servers", fleet.prefill_num_servers or None),
    ):
        if addresses and value is not None:
            yield Problem(
                f"fleet.{name}",
                f"{value} beside rollout_external_engine_addrs",
                "one of them",
                "external engines bring their own GPUs and arguments",
            )
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536 or addresses.count(address) > 1:
            yield Problem(
                "fleet.rollout_external_engine_addrs", repr(address), "host:port, each of them once"
            )
        elif (
            wanted_transport(train) != "disk"
            and train.train_backend not in NO_TRAINER
            and not is_here(address)
        ):
            yield Problem(
                "train.update_weight_transport",
                f"{wanted_transport(train) or 'memory, which is the default'}, and the engine {address} on another host",
                "disk, in full",
                "the other transports go by the memory of one host; give --update-weight-transport disk, and an "
                "--output-dir that both hosts see under one name",
            )


def _key_problems(fleet: FleetSection) -> Iterator[Problem]:
    """Refuse a file that holds no key, and one that nobody asks for."""
    path = fleet.rollout_external_key_file
    if path is None:
        return
    if not fleet.rollout_external_engine_addrs and fleet.sglang_router_ip is None:
        yield Problem(
            "fleet.rollout_external_key_file",
            f"{path}, and nothing that runs already",
            "rollout_external_engine_addrs or sglang_router_ip beside it",
            "servers that the run starts ask for a key that it makes",
        )
    try:
        read_key(path, where="fleet.rollout_external_key_file")
    except ConfigError as error:
        yield from error.problems


def _router_of(fleet: FleetSection) -> str:
    """Return the setting that asks for a router."""
    return "fleet.router_policy" if fleet.router_policy is not None else "fleet.sglang_router_ip"


def _router_problems(fleet: FleetSection) -> Iterator[Problem]:
    """Refuse a router that is not there, or that two settings choose."""
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
            "pip install 'slime-sglang[router]', or drop the policy: engines get requests without a router, too",
        )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of SGLang, of its router, and of what hands its cache over."""
    found = {
        "sglang": "not installed; slime-sglang needs it",
        "sglang-router": "not installed; --router-policy needs it",
    }
    for name in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"mooncake": _mooncake()}


def _mooncake() -> str:
    missing = missing_for_mooncake()
    if missing is not None:
        return f"no {missing[0]}; --prefill-num-servers needs it: {missing[1]}"
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{importlib.metadata.version(name)} ({name})"
    return "of a distribution unknown here"
