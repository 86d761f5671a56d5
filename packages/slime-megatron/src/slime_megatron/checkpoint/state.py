"""`TrainerState`: what a checkpoint holds so that training resumes exactly, and loading it from a `torch_dist` folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from slime_core.errors import CheckpointError
from slime_models.family.architecture import Architecture
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_megatron.checkpoint.unpickling import first_line, read_index
from slime_megatron.importing import quiet
from slime_megatron.model.lora import shard_adapters
from slime_megatron.optim.first_state import (
    counts_for_each,
    fill,
    fill_steps,
    inner_optimizers,
    own_steps,
)
from slime_megatron.optim.master_weights import weights_unlike_masters
from slime_megatron.optim.optimizer import (
    MASTERS,
    SHARDING,
    converted,
    drop_classes,
    hyperparameters,
    level_steps,
    load_optimizer,
    parts_of,
    rearranged,
    step_of,
)
from slime_megatron.optim.skipped_steps import SkippedSteps
from slime_megatron.optim.state_parts import share_out
from slime_megatron.optim.steps import agree_on_steps
from slime_megatron.optim.weight_sets import WeightSets
from slime_megatron.parallel.process_groups import device
from slime_megatron.settings.manifest import check_same, describe, read_description
from slime_megatron.settings.section_roles import LoraSection

logger = logging.getLogger(__name__)

#: Version of the folder's layout, to be raised when an older reader could not read a newer folder.
_FORMAT = 1
_METADATA = {"distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True}
#: Whether ranks shared the optimizer's state when a folder was written.
_SHARED = "use_distributed_optimizer"
#: Whether what is trained of one layer was trained of all; older folders, which could not be written otherwise, do not say.
_ALIKE = "trains_layers_alike"
#: What names of master weights begin with in checkpoints: of a plain optimizer, and of a distributed one.
_MASTER, _SHARED_MASTER = "optimizer.state.fp32_param.", "optimizer.state.param."
#: And those of first moments.
_MOMENT = "optimizer.state.exp_avg."


@dataclass(frozen=True)
class TrainerState:
    """What is saved and restored, in place."""

    architecture: Architecture
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    weight_sets: WeightSets | None = None
    """Those that training changes are saved with the model."""
    lora: LoraSection | None = None
    estimator: dict[str, Any] = field(default_factory=dict)
    """What the advantage estimator remembers: JSON values."""
    skipped_steps: SkippedSteps = field(default_factory=lambda: SkippedSteps(0))
    """How many optimizer steps in a row were skipped."""
    trains_layers_alike: bool = True
    """Whether what is trained of one layer is trained of all. Else what is there of trained parameters alone is stored layer by layer,
    and not as one tensor of all layers, which would have holes."""

    @property
    def shares_optimizer(self) -> bool:
        """Whether data-parallel ranks share the optimizer's state."""
        return bool(self.model.ddp_config.use_distributed_optimizer)

    @property
    def description(self) -> dict[str, Any]:
        """What a folder must agree on with the trainer that reads it."""
        return {
            "format": _FORMAT,
            "bf16": self.model.config.bf16,
            "fp16": self.model.config.fp16,
            "architecture": describe(self.architecture),
            _ALIKE: self.trains_layers_alike,
            "lora": None if self.lora is None or self.lora.rank is None else self.lora.model_dump(),
        }


def planned(state: TrainerState, folder: Path) -> AsyncRequest:
    """Return how Megatron is to write the state into a folder that all ranks see. Collective over the world.

    Of several ranks only the CPU's random state is written, which is the same on all: training draws nothing. An optimizer's
    state that data-parallel ranks share is gathered on the host of the first of them, 12 bytes a parameter, and written there.
    """
    sharded = _sharded(state, is_loading=False) | {"rng": _rng_state()}
    return dist_checkpointing.save(sharded, str(folder), async_sharded_save=True, async_strategy="mcore")


def described(state: TrainerState) -> dict[str, Any]:
    """Return what the folder's description says of a state: JSON values."""
    return {
        **state.description,
        _SHARED: state.shares_optimizer,
        "optimizer_steps": state.scheduler.num_steps,
        "skipped_in_a_row": state.skipped_steps.in_a_row,
        "estimator": state.estimator,
        "train": hyperparameters(state.optimizer, state.scheduler),
        "roles": [] if state.weight_sets is None else list(state.weight_sets.checkpointed),
        "versions": {name: version(name) for name in ("megatron-core", "torch", "slime-megatron")},
    }


def load(state: TrainerState, folder: Path) -> None:
    """Restore what a `CheckpointWriter` wrote, under this or another parallel layout. Collective over the world.

    Whether ranks shared the optimizer's state then, and whether they do now, makes no difference. Where they do, the first of
    them reads all of it, 12 bytes a parameter on its host, and sends each its part.

    Settings of the optimizer and its schedule are this trainer's: where they differ from those of the run that wrote the
    folder, the log says so. The schedule goes on at its step.

    Raises:
        CheckpointError: the folder is incomplete, or of another model or precision, and names the field that differs; or its master
            weights are not those of its weights, and names a parameter.
    """
    description = {_ALIKE: True} | read_description(folder)
    check_same(
        description,
        state.description,
        whose="this trainer's",
        todo="load a checkpoint of the same model and precision, of which the same layers were frozen",
    )
    converts = description.get(_SHARED, False) != state.shares_optimizer
    if state.weight_sets is not None:
        for role in description.get("roles", ()):
            state.weight_sets.snapshot(role, checkpointed=True)  # makes room
    try:
        with quiet():
            wanted = _sharded(state, is_loading=True)
            if converts:
                _rename_masters(
                    wanted["optimizer"], in_float32=state.model.config.params_dtype is torch.float32
                )
            loaded = dist_checkpointing.load(wanted, str(folder))
    except (
        Exception,
        CheckpointException,
    ) as error:  # what is raised depends on which file is damaged, and how
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(cause, CheckpointError):
            raise cause from None
        # torch 2.11 does not tell when this is why, and says "metadata is None"
        read_index(folder / ".metadata")
        raise CheckpointError(f"{folder}: cannot be read: {first_line(cause)}") from error
    state.model.module.load_state_dict(loaded["model"])
    if converts:
        saved = converted(loaded["optimizer"], state.optimizer, shares=state.shares_optimizer)
    else:
        saved = rearranged(loaded["optimizer"], state.optimizer)
    _check_masters(folder, state.model.module, _set_optimizer(state, saved))
    if state.weight_sets is not None:
        for role, weights in loaded.get("roles", {}).items():
            state.weight_sets.restore(role, weights)
    state.estimator.clear()
    state.estimator.update(description.get("estimator", {}))
    state.skipped_steps.in_a_row = description.get("skipped_in_a_row", 0)
    state.scheduler.num_steps = description["optimizer_steps"]
    state.scheduler.step(0)
    _tell_changes(description, hyperparameters(state.optimizer, state.scheduler))
    _set_rng_state(loaded["rng"])


def _set_optimizer(state: TrainerState, saved: dict[Any, Any]) -> list[torch.Tensor]:
    """Restore an optimizer from what was read, arranged as it arranges its state. Collective over the world.

    Returns:
        This rank's parameters that are not made of their master weights.
    """
    optimizers = state.optimizer.chained_optimizers
    if not state.shares_optimizer:
        _complete_parts(saved, state.optimizer)
        read = zip(optimizers, parts_of(saved), strict=True)
        found = [weight for each, part in read for weight in weights_unlike_masters(each, part)]
        load_optimizer(state.optimizer, saved)
        return found
    level_steps(saved)
    tensors = [part.pop("param_state", {}) for part in parts_of(saved)]
    load_optimizer(state.optimizer, saved)
    pairs = zip(optimizers, tensors, strict=True)
    found = [weight for each, whole in pairs for weight in share_out(each, whole)]
    for inner in inner_optimizers(state.optimizer):
        own_steps(inner)
    return found


def _check_masters(folder: Path, model: torch.nn.Module, differing: Sequence[torch.Tensor]) -> None:
    """Check that no rank has found a parameter that is not made of its master weights. Collective over the world.

    Raises:
        CheckpointError: one has, on whichever rank; names it.
    """
    some = torch.tensor(float(bool(differing)), device=device())
    torch.distributed.all_reduce(some)
    if not some.item():
        return
    wanted = set(map(id, differing))
    found: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    own = [name for name, weight in model.named_parameters() if id(weight) in wanted]
    torch.distributed.all_gather_object(found, own)
    first, *others = dict.fromkeys(name for names in found for name in names)
    beside = f" and {len(others)} others" if others else ""
    raise CheckpointError(
        f"{folder}: found master weights of {first}{beside} that its weights are not rounded from; wanted those that they are. An "
        "earlier version wrote them, and the moments, beside their places where a bucket of gradients ends in padding. The weights "
        "are good, unless their run had gone on from such a checkpoint: start another run from them, by another --run-name, without "
        f"--load, and with --actor-load {folder} (of a critic: --critic-load)"
    )


def _tell_changes(description: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Log which settings of the optimizer are not those that a folder's steps were taken with."""
    if torch.distributed.get_rank() != 0:
        return
    before = description.get("train", {})  # older folders do not say
    changed = [
        f"{name} {before[name]!r} -> {value!r}"
        for name, value in settings.items()
        if name in before and before[name] != value
    ]
    if changed:
        logger.warning(
            "resuming at optimizer step %d with other settings than before: %s",
            description["optimizer_steps"],
            ", ".join(changed),
        )


def _sharded(state: TrainerState, *, is_loading: bool) -> dict[str, Any]:
    data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**_METADATA, "dp_cp_group": data_parallel}
    model = state.model.module.sharded_state_dict(metadata=metadata)
    shard_adapters(model, state.model.module, data_parallel)
    trained = model
    if not state.trains_layers_alike:
        trained = state.model.module.sharded_state_dict(metadata=metadata | {"non_homogeneous_layers": True})
    if state.shares_optimizer or (not is_loading and state.optimizer.config.optimizer == "adam"):
        fill(state.optimizer)
        for inner in inner_optimizers(state.optimizer) if state.shares_optimizer else ():
            fill_steps(inner)
    optimizer = state.optimizer.sharded_state_dict(
        {"model": trained}, is_loading=is_loading, metadata=metadata
    )
    for each in parts_of(optimizer):
        if each.get("param_state", ()) is None:  # of another rank than the first of those that share it
            each["param_state"] = LocalNonpersistentObject({})
        if not is_loading and not any(each.get(MASTERS, ())):
            each.pop(
                MASTERS, None
            )  # empty lists are no tensors: they would be read in the place of other ranks' lists
    drop_classes(optimizer)
    if not is_loading:
        agree_on_steps(optimizer)
    sharded = {"model": model, "optimizer": optimizer}
    if state.weight_sets is not None and state.weight_sets.checkpointed:
        sharded["roles"] = {
            role: state.weight_sets.sharded(role, trained) for role in state.weight_sets.checkpointed
        }
    return sharded


def _rename_masters(optimizer: dict[Any, Any], *, in_float32: bool) -> None:
    """Let an optimizer look for master weights under the name that one of the other kind stored them by.

    Where the model is in float32, a plain one has none of its own: weights are, and `converted` takes them. It reads those of a
    distributed one all the same, which are held against the weights.
    """
    for part in parts_of(optimizer):
        read = part.get("param_state", {})
        for tensors in read.values() if isinstance(read, dict) else ():
            master = tensors.pop("param")
            if not in_float32:
                key = master.key.replace(_SHARED_MASTER, _MASTER, 1)
                tensors["param"] = dataclasses.replace(master, key=key)
        part[MASTERS] = [
            [dataclasses.replace(each, key=each.key.replace(_MASTER, _SHARED_MASTER, 1)) for each in group]
            for group in part.get(MASTERS, [])
        ]
        for tensors in part.get("state", {}).values() if in_float32 else ():
            if isinstance(tensors, dict) and "exp_avg" in tensors:
                moment = tensors["exp_avg"]
                key = moment.key.replace(_MOMENT, _SHARED_MASTER, 1)
                tensors["param"] = dataclasses.replace(moment, key=key, data=torch.empty_like(moment.data))


def _complete_parts(saved: dict[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Give each optimizer what rank 0 does not know of it, which speaks for all: it may have no experts.

    Then it leaves out the lists of master weights, and the number of steps, as Megatron 0.19.2 does where that is 0.
    Megatron looks for both when it loads. The number goes where this optimizer has it.
    """
    parts = parts_of(saved)
    if MASTERS in parts[0]:
        for each in parts:
            each.setdefault(MASTERS, [])
    if optimizer.config.optimizer != "adam":
        return
    step = step_of(saved)
    for each in (part.get("optimizer", part) for part in parts):
        if all(map(counts_for_each, inner_optimizers(optimizer))):
            each["state"]["common_step"] = torch.tensor(step)
        else:
            each["state"].pop("common_step", None)
            for group in each["param_groups"]:
                group["step"] = int(step)


def _rng_state() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.distributed.get_world_size() == 1:
        states["cuda"] = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        states["tracker"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states


def _set_rng_state(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.distributed.get_world_size() > 1 or "tracker" not in states:
        return
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
