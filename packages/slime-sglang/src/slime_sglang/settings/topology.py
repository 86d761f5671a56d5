"""`--sglang-config`: which models a run serves, by which groups of engines, on which GPUs. Imports neither torch nor sglang.

Source: the YAML of slime's `--sglang-config`, from which we differ in what is refused: `problems_of` says it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from pydantic import Field, StringConstraints, ValidationError
from slime_core.config.base import Count, SectionModel
from slime_core.config.derive import is_local, num_ranks
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.files.strict_read import read_text
from slime_core.protocols import EngineGpus, GpuRange
from slime_core.rundir.served_models import NAME

from slime_sglang.settings.section import WHY_NO_ENCODERS, FleetSection, argument_problems

#: Name of the model of a run without `--sglang-config`.
_POLICY = "policy"

#: What an engine does: prefill and decode, or only one of them.
Role = Literal["regular", "prefill", "decode"]
_ROLES: tuple[Role, ...] = get_args(Role)


class ServerGroup(SectionModel):
    """Engines that are started alike, or GPUs that are left unused."""

    worker_type: Literal["regular", "placeholder", "prefill", "decode", "encoder"] = "regular"
    """`regular` engines; those that only `prefill` or only `decode`; or a `placeholder`, whose GPUs are left unused."""
    num_gpus: Count
    """GPUs of all its engines together; without GPUs the number of ranks."""
    num_gpus_per_engine: Count | None = None
    """GPUs of one engine; the model's when not given."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own arguments, over those of the run."""


class ServedModel(SectionModel):
    """One model, and the groups of engines that serve it."""

    name: Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
    """Name by which rewards find it."""
    model_path: str | None = None
    """Hugging Face folder, or a name; the run's own when not given."""
    update_weights: bool | None = None
    """Whether it is the policy, which gets the trainer's weights; when not given, it is if it is the run's own."""
    num_gpus_per_engine: Count | None = None
    """GPUs of one engine, where a group does not say; `--rollout-num-gpus-per-engine` when not given."""
    server_groups: Annotated[list[ServerGroup], MinLen(1)]
    """Its engines."""


class ServedModels(SectionModel):
    """The whole file."""

    sglang: Annotated[list[ServedModel], MinLen(1)]
    """All models."""


@dataclass(frozen=True)
class EnginePlacement:
    """The GPUs of one engine, and its arguments."""

    first_gpu: int
    """Its first GPU, counted from the run's first."""
    num_gpus: int = 1
    """GPUs from there on; its ranks."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's own arguments, over those of the run."""
    role: Role = "regular"
    """Whether the engine prefills, decodes, or does both."""


@dataclass(frozen=True)
class ServingTopology:
    """The models that a run serves, and the GPUs of their engines."""

    models: Sequence[ServedModel]
    checkpoint: str
    """The run's own model, as the settings spell it."""
    per_engine: int
    """GPUs of one engine, where neither group nor model says."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups together."""
        return sum(group.num_gpus for model in self.models for group in model.server_groups)

    @property
    def num_ranks(self) -> int:
        """Ranks of all engines together."""
        return sum(placement.num_gpus for model in self.models for placement in self.placements(model))

    @property
    def gpus(self) -> EngineGpus:
        """The GPUs of all engines, as a launcher is told of them."""
        ranges = [
            GpuRange(placement.first_gpu, placement.num_gpus, f"{model.name} {number}")
            for model in self.models
            for number, placement in enumerate(self.placements(model))
        ]
        return EngineGpus(self.num_gpus, tuple(sorted(ranges, key=lambda each: each.first)))

    @property
    def policies(self) -> list[ServedModel]:
        """The models that get the trainer's weights; one where nothing is wrong."""
        return [model for model in self.models if self.is_policy(model)]

    @property
    def others(self) -> list[ServedModel]:
        """The models that are not trained."""
        return [model for model in self.models if not self.is_policy(model)]

    def is_policy(self, model: ServedModel) -> bool:
        """Whether a model gets the trainer's weights."""
        if model.update_weights is not None:
            return model.update_weights
        return model.model_path in (None, self.checkpoint)

    def is_disaggregated(self, model: ServedModel) -> bool:
        """Whether a model is served by prefill and decode engines."""
        return any(placement.role != "regular" for placement in self.placements(model))

    def size(self, model: ServedModel, group: ServerGroup) -> int:
        """Return the GPUs of one engine of a group."""
        return group.num_gpus_per_engine or model.num_gpus_per_engine or self.per_engine

    def placements(self, model: ServedModel) -> list[EnginePlacement]:
        """Return the placements of a model's engines. Groups get their GPUs in the order of the file."""
        found, first = [], 0
        for other in self.models:
            for group in other.server_groups:
                size = self.size(other, group)
                if other is model and group.worker_type in _ROLES:
                    starts = range(first, first + group.num_gpus, size)
                    found += [
                        EnginePlacement(start, size, group.overrides, group.worker_type) for start in starts
                    ]
                first += group.num_gpus
        return found


def serving_topology(settings: Settings) -> ServingTopology:
    """Return the topology that the settings ask for.

    Raises:
        ConfigError: the file is not there, no YAML, or has keys or values that are none; names all of them.
    """
    fleet = settings.section(FleetSection)
    if fleet.sglang_config is not None:
        models = _read(fleet.sglang_config).sglang
    else:
        models = [ServedModel(name=_POLICY, server_groups=_groups(fleet, all_gpus(settings)))]
    return ServingTopology(models, settings.model.hf_checkpoint, fleet.rollout_num_gpus_per_engine)


def gpus_of(settings: Settings) -> EngineGpus:
    """Return the GPUs of all engines' processes; an engine larger than a machine has a process on each of several."""
    found = serving_topology(settings).gpus
    processes = [
        GpuRange(
            first,
            count,
            f"{process.name} on node {number}" if number or count < process.count else process.name,
        )
        for process in found.processes
        for number, (first, count) in enumerate(pieces(process.first, process.count, settings))
    ]
    return EngineGpus(found.total, tuple(processes))


def pieces(first: int, count: int, settings: Settings) -> list[tuple[int, int]]:
    """Return (first, count) of the GPUs of an engine on each machine: one piece, unless it takes several whole machines."""
    cluster = settings.cluster
    size = cluster.actor_num_gpus_per_node if cluster.colocate else cluster.num_gpus_per_node or count
    if is_local(settings.run) or count <= size or count % size:
        return [(first, count)]
    return [(start, size) for start in range(first, first + count, size)]


def all_gpus(settings: Settings) -> int:
    """Return the GPUs of all engines of a run without a file: those that are given; the trainer's, where a launcher places
    both on the same ones; or one engine's."""
    fleet = settings.section(FleetSection)
    if fleet.rollout_num_gpus is not None:
        return fleet.rollout_num_gpus
    if settings.cluster.colocate and not is_local(settings.run):
        return num_ranks(settings)
    return fleet.rollout_num_gpus_per_engine


def _groups(fleet: FleetSection, total: int) -> list[ServerGroup]:
    """Return the groups that settings without a file ask for, on so many GPUs."""
    n_prefill_gpus = fleet.prefill_num_servers * fleet.rollout_num_gpus_per_engine
    if not 0 < n_prefill_gpus < total:  # the second of which is refused
        return [ServerGroup(num_gpus=total)]
    return [
        ServerGroup(worker_type="prefill", num_gpus=n_prefill_gpus),
        ServerGroup(worker_type="decode", num_gpus=total - n_prefill_gpus),
    ]


def problems_of(settings: Settings) -> Iterator[Problem]:
    """Yield everything that is wrong with the file of `--sglang-config`."""
    fleet = settings.section(FleetSection)
    path = fleet.sglang_config
    try:
        topology = serving_topology(settings)
    except ConfigError as error:
        yield from error.problems
        return
    if fleet.rollout_num_gpus not in (None, topology.num_gpus):
        yield Problem(
            f"{path}: the sum of num_gpus",
            str(topology.num_gpus),
            f"{fleet.rollout_num_gpus}, as rollout_num_gpus says",
        )
    if len(topology.policies) != 1:
        names = ", ".join(model.name for model in topology.policies)
        yield Problem(
            f"{path}: sglang",
            f"{len(topology.policies)} models that get the trainer's weights{': ' * bool(names)}{names}",
            "one",
            "it is the one without model_path; update_weights: false has another one stay as it is",
        )
    for name, n in Counter(model.name for model in topology.models).items():
        if n > 1:
            yield Problem(f"{path}: sglang", f"the name {name!r} {n} times", "each name once")
    for number, model in enumerate(topology.models):
        yield from _model_problems(topology, model, f"{path}: sglang.{number}")


def _model_problems(topology: ServingTopology, model: ServedModel, where: str) -> Iterator[Problem]:
    for number, group in enumerate(model.server_groups):
        yield from _group_problems(group, topology.size(model, group), f"{where}.server_groups.{number}")
    kinds = {group.worker_type for group in model.server_groups} - {"placeholder"}
    if not kinds:
        yield Problem(f"{where}.server_groups", "no engine", "one regular group at least")
    if kinds & {"prefill", "decode"} and kinds != {"prefill", "decode"}:
        yield Problem(
            f"{where}.server_groups",
            f"{' and '.join(sorted(kinds))} groups",
            "both prefill and decode, and no others; or regular ones",
            "each request needs a prefill engine and a decode engine",
        )
    elif kinds & {"prefill", "decode"} and not topology.is_policy(model):
        yield Problem(
            f"{where}.server_groups",
            f"prefill and decode groups of {model.name!r}, which is not the policy",
            "regular groups",
            "rewards ask the servers of such a model one at a time",
        )
    if topology.is_policy(model) and model.model_path not in (None, topology.checkpoint):
        yield Problem(
            f"{where}.model_path",
            str(model.model_path),
            f"{topology.checkpoint}, the run's own",
            "leave it out for the policy; give update_weights: false for another model",
        )


def _group_problems(group: ServerGroup, size: int, where: str) -> Iterator[Problem]:
    if group.worker_type == "encoder":
        yield Problem(
            f"{where}.worker_type", "encoder", "regular, prefill, decode or placeholder", WHY_NO_ENCODERS
        )
    elif group.worker_type == "placeholder":
        if group.overrides:
            yield Problem(f"{where}.overrides", "some of a placeholder", "none: it starts nothing")
    elif group.num_gpus % size:
        yield Problem(
            f"{where}.num_gpus",
            f"{group.num_gpus} with num_gpus_per_engine {size}",
            f"a multiple of {size}",
            f"{group.num_gpus % size} would be left over",
        )
    yield from argument_problems(group.overrides, where=f"{where}.overrides")
    if "base_gpu_id" in group.overrides:
        yield Problem(
            f"{where}.overrides.base_gpu_id",
            str(group.overrides["base_gpu_id"]),
            "nothing: groups get their GPUs in the order of the file",
            "a placeholder group leaves some alone; --sglang-base-gpu-id is the first of all",
        )


def _read(path: Path) -> ServedModels:
    import yaml  # here: every slime command imports this module

    try:
        text = read_text(path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        given = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Problem("fleet.sglang_config", f"{path} ({why})", "a YAML file")]) from error
    except yaml.YAMLError as error:
        raise ConfigError([Problem(str(path), f"no YAML: {' '.join(str(error).split())}", "YAML")]) from error
    problems = [
        Problem(f"{path}: line {line}", f"the key {key!r} again", "each key once")
        for key, line in _repeated(root)
    ]
    try:
        models = ServedModels.model_validate(given)
    except ValidationError as error:
        problems += [_problem(path, detail) for detail in error.errors()]
    if problems:
        raise ConfigError(problems)
    return models


def _repeated(root: Any) -> Iterator[tuple[str, int]]:
    """Yield (key, line) of each key that its table has already; YAML would take the last."""
    waiting, known = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node.id == "scalar" or id(node) in known:  # an alias may stand in itself
            continue
        known.add(id(node))
        if node.id == "sequence":
            waiting += node.value
            continue
        waiting += [value for _, value in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in [earlier.value for earlier, _ in node.value[:number]]:
                yield key.value, key.start_mark.line + 1


_TABLES: dict[str, type[SectionModel]] = {"sglang": ServedModel, "server_groups": ServerGroup}


def _problem(path: Path, detail: Mapping[str, Any]) -> Problem:
    """Return pydantic's error as a problem."""
    location = detail["loc"]
    where = f"{path}: {'.'.join(map(str, location)) or 'the file'}"
    if detail["type"] == "missing":
        return Problem(where, "nothing", "a value")
    is_unknown = detail["type"] == "extra_forbidden"
    tables = [_TABLES[name] for name in location[: -1 if is_unknown else None] if name in _TABLES]
    fields = (tables[-1] if tables else ServedModels).model_fields
    if is_unknown:
        near = difflib.get_close_matches(str(location[-1]), fields, n=1)
        return Problem(where, "an unknown key", repr(near[0]) if near else f"one of {', '.join(fields)}")
    found = repr(detail["input"])[:80]
    if detail["type"] == "model_type":
        return Problem(where, found, f"a table of {', '.join(fields)}")
    message = str(detail["msg"]).removeprefix("Input should be ")
    return Problem(where, found, message[0].lower() + message[1:])
