"""The optimizer with float32 master weights, its learning-rate schedule, and its state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from slime_core.config.derive import compute_dtype
from slime_core.config.sections import TrainSection
from slime_core.errors import CheckpointError

from slime_megatron.optim.first_state import counts_for_each, fill_moments, fill_momentum
from slime_megatron.optim.loss_scaler import SharedLossScaler
from slime_megatron.parallel import process_groups
from slime_megatron.settings.derive import offloads_optimizer
from slime_megatron.settings.megatron_flags import with_flags
from slime_megatron.settings.section import MegatronSection

#: Of float16. Megatron's own, 2**32, overflows in the first 16 steps or so, each of which is a rollout here.
_FIRST_LOSS_SCALE = 2.0**16
#: How a distributed optimizer arranges its state in checkpoints: by parameters, so that any layout can read it.
SHARDING = "fully_reshardable"
#: Where a plain optimizer has its float32 copies of parameters.
MASTERS = "fp32_from_fp16_params"
#: With `--optimizer-cpu-offload`: all of the state, as Megatron's script has it, and master weights in the offloaded optimizer,
#: without which Megatron 0.19.2 cannot read its checkpoints. Only a machine with CUDA has pinned memory.
_OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
    "pin_cpu_grads": torch.cuda.is_available(),
    "pin_cpu_params": torch.cuda.is_available(),
}
#: What Megatron's own flags may change.
_DEFAULTS = frozenset({"initial_loss_scale", "optimizer_offload_fraction", "pin_cpu_grads", "pin_cpu_params"})
#: What tells groups of parameters apart, and what of them the schedule reads. Megatron 0.19.2 says of none that its rate is decoupled
#: (`is_decoupled_lr`), and of those that it is not that theirs is the usual one.
_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "default_config")
_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")


def build_optimizer(
    model: DistributedDataParallel, train: TrainSection, section: MegatronSection
) -> MegatronOptimizer:
    """Return the optimizer of the model's parameters; their values now are those of the master weights.

    Raises:
        TrainerError: one of Megatron's own flags contradicts `train` or `section`; names both.
    """
    dtype: torch.dtype = getattr(torch, compute_dtype(train))
    ours = partial(
        OptimizerConfig,
        optimizer=section.optimizer,
        sgd_momentum=section.sgd_momentum,
        use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=_FIRST_LOSS_SCALE,
        params_dtype=dtype,
        **(_OFFLOADED if offloads_optimizer(section) else {}),
    )
    config = with_flags(ours, section.megatron_args, "optimizer", defaults=_DEFAULTS)
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    _share_scaler(optimizer)
    if loss_scaler(optimizer) is not None:
        model.config.grad_scale_func = optimizer.scale_loss
    for each in optimizer.chained_optimizers:
        if section.optimizer == "sgd":
            each.init_state_fn = fill_momentum  # Megatron 0.19.2 gives it none, and calls it when it loads
        elif each.optimizer is not None and counts_for_each(each.optimizer):
            each.init_state_fn = (
                fill_moments  # Megatron's own leaves steps out, without which torch takes none
            )
    for group in optimizer.param_groups if section.optimizer == "adam" else ():
        group["fused"] = (
            True  # torch's plain loop, Megatron's choice without TransformerEngine, is 5 times as slow
        )
    return optimizer


def _share_scaler(optimizer: MegatronOptimizer) -> None:
    """Give the optimizers of dense parameters and of experts one scaler: the loss is scaled by one number."""
    scalers = [each.grad_scaler for each in _with_scaler(optimizer)]
    shared = SharedLossScaler(scalers[0]) if scalers else None
    for each in _with_scaler(optimizer):
        each.grad_scaler = shared


def loss_scaler(optimizer: MegatronOptimizer) -> SharedLossScaler | None:
    """Return what scales the loss; None where nothing does."""
    return next((each.grad_scaler for each in _with_scaler(optimizer)), None)


def _with_scaler(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return [each for each in optimizer.chained_optimizers if getattr(each, "grad_scaler", None) is not None]


def build_scheduler(
    optimizer: MegatronOptimizer, train: TrainSection, *, total_steps: int | None
) -> OptimizerParamScheduler:
    """Return Megatron's schedule; it counts optimizer steps, and the first of a warm-up has learning rate 0.

    Args:
        optimizer: whose learning rate it sets.
        train: the settings.
        total_steps: optimizer steps of the run, over which the rate decays when `lr_decay_iters` is not given;
            None is allowed for a constant rate.
    """
    decay_steps = train.lr_decay_iters or total_steps or 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=min(train.min_lr, train.lr),
        lr_warmup_steps=train.lr_warmup_iters,
        lr_decay_steps=max(decay_steps, train.lr_warmup_iters + 1),
        lr_decay_style=train.lr_decay_style,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def hyperparameters(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    """Return the settings of optimizer and schedule by their names in `train`, those that a resumed run may change."""
    found = {
        "lr": scheduler.max_lr,
        "min_lr": scheduler.min_lr,
        "lr_decay_style": scheduler.lr_decay_style,
        "lr_warmup_iters": scheduler.lr_warmup_steps,
        "weight_decay": scheduler.start_wd,
    }
    if scheduler.lr_decay_style != "constant":
        found["lr_decay_iters"] = scheduler.lr_decay_steps
    config = optimizer.config
    if config.optimizer == "adam":
        found |= {name: getattr(config, name) for name in ("adam_beta1", "adam_beta2", "adam_eps")}
    return found


def drop_classes(state: dict[Any, Any]) -> None:
    """Take classes out of the groups of a state to be saved: those of an offloaded optimizer name what it is made of."""
    for group in _groups_of(state):
        for key in [key for key, value in group.items() if isinstance(value, type)]:
            del group[key]


def level_steps(saved: dict[Any, Any]) -> None:
    """Give all groups of a distributed optimizer's saved state the number of steps of those that have one.

    All take the same steps, and rank 0, which speaks for all, may have no part of some.
    """
    groups = list(_groups_of(saved))
    most = max(int(group.get("step") or 0) for group in groups)
    for group in groups:
        group["step"] = most


def load_optimizer(optimizer: MegatronOptimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer's state, and keep its own settings: learning rates, weight decay, betas, epsilon.

    Args:
        optimizer: of the same parameters.
        saved: what its `state_dict` was; changed here.

    Raises:
        CheckpointError: it is that of other groups of parameters.
    """
    own = [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    for group in _groups_of(saved):  # Megatron looks for a group by its settings, too
        for other in own:
            if all(group.get(key) == other.get(key) for key in _KIND):
                group.update({key: other[key] for key in _SCHEDULED if key in other})
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, KeyError) as error:  # of a plain optimizer, and of a distributed one
        raise CheckpointError(
            f"checkpoint: the optimizer's groups of parameters are others ({error}); train the same parameters by as many learning "
            "rates: only_train_params_name_list, freeze_params_name_list and --decoupled-lr, or none, as they were"
        ) from error
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def parts_of(saved: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of the optimizers that a saved state is of: Megatron numbers them if there are several."""
    return [saved[number] for number in sorted(key for key in saved if isinstance(key, int))] or [saved]


def rearranged(saved: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """Return an optimizer's saved state in the structure of this rank's optimizer.

    With expert parallelism Megatron keeps experts in an optimizer of their own, and numbers the two; without it there is
    one. Tensors are found by the names of parameters either way; the rest, the number of steps and the scale of the loss,
    is alike in both. Groups of parameters are this optimizer's.

    Args:
        saved: what was read: tensors as this optimizer arranges them, the rest as the one that was saved did. Changed here.
        optimizer: whose state it becomes.
    """
    plain = {key: value for key, value in saved.items() if not isinstance(key, int)}
    if not plain or len(plain) == len(saved):
        return saved
    if len(optimizer.chained_optimizers) > 1:
        mine, rest = {key: value for key, value in saved.items() if key not in plain}, plain
    else:
        mine, rest = plain, parts_of(saved)[0]
    for state, each in zip(parts_of(mine), optimizer.chained_optimizers, strict=True):
        state.update({key: rest[key] for key in ("grad_scaler", "param_state_sharding_type") if key in rest})
        inner, other = state, rest
        if "optimizer" in rest:
            inner, other = state.setdefault("optimizer", {}), rest["optimizer"]
        if "common_step" in other.get("state", {}):
            inner.setdefault("state", {})["common_step"] = other["state"]["common_step"]
        step = {key: value for key, value in other["param_groups"][0].items() if key == "step"}
        members = inner.get("param_groups", [{}] * len(each.param_groups))
        inner["param_groups"] = [
            {key: value for key, value in group.items() if key != "params"} | step | own
            for group, own in zip(each.param_groups, members, strict=True)
        ]
    return mine


def converted(saved: dict[Any, Any], optimizer: MegatronOptimizer, *, shares: bool) -> dict[Any, Any]:
    """Return the saved state of a plain optimizer as that of a distributed one, or the other way round.

    Both store the same tensors. What is beside them, the number of steps and the scale of the loss, has another structure; groups
    of parameters are this optimizer's. Master weights that were not read are the weights of the model, which are.

    Args:
        saved: what was read: tensors as this optimizer arranges them, the rest as the one that was saved did.
        optimizer: whose state it becomes.
        shares: whether it is a distributed one.
    """
    number, scale = step_of(saved), _first(saved, "grad_scaler")
    several = len(optimizer.chained_optimizers) > 1
    found: dict[Any, Any] = {}
    for i, each in enumerate(optimizer.chained_optimizers):
        state = saved.get(i, {}) if several else saved  # nothing is read for a rank without parameters
        found[i] = _as_shared(state, each, number) if shares else _as_plain(state, each, number)
        if scale is not None:
            found[i]["grad_scaler"] = scale
    return found if several else found[0]


def _as_shared(state: dict[Any, Any], optimizer: Any, step: float) -> dict[str, Any]:
    """Return the state of one distributed optimizer of those whose tensors were read."""
    found = state.get("param_state", {})  # empty but on the first of the ranks that share it
    weights = [weight.detach() for buffer in optimizer.buffers for weight in buffer.param_index_map]
    tensors = {
        key: {"param": weight, **read}
        for weight, (key, read) in zip(weights if found else (), sorted(found.items()), strict=True)
    }
    groups = [{**group, "step": step} for group in optimizer.state_dict()["optimizer"]["param_groups"]]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": tensors,
        "param_state_sharding_type": SHARDING,
    }


def _as_plain(state: dict[Any, Any], optimizer: Any, step: float) -> dict[str, Any]:
    """Return the state of one plain optimizer of those whose tensors were read."""
    own = optimizer.state_dict()
    in_half = "optimizer" in own  # beside float32 copies of parameters
    read = (state.get("optimizer", {}) if in_half else state).get("state", {})
    tensors = {key: value for key, value in read.items() if isinstance(key, int)}
    groups = (own["optimizer"] if in_half else own)["param_groups"]
    found = {"state": tensors | {"common_step": torch.tensor(float(step))}, "param_groups": groups}
    return {"optimizer": found, MASTERS: state.get(MASTERS, [])} if in_half else found


def step_of(saved: Any) -> float:
    """Return the number of optimizer steps that a saved state was made by."""
    step = _first(saved, "common_step")
    return float(_first(saved, "step") or 0) if step is None else float(step)


def _first(state: Any, key: str) -> Any:
    """Return the first value of a key in tables and lists within each other, None where there is none."""
    if isinstance(state, dict) and state.get(key) is not None:
        return state[key]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return next((found for value in values if (found := _first(value, key)) is not None), None)


def _groups_of(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of parameters of all optimizers of a saved state."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "param_groups":
            yield from value
        else:
            yield from _groups_of(value)


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Return the learning rate of the next step."""
    return float(optimizer.param_groups[0]["lr"])


def update(optimizer: MegatronOptimizer, *, clip_grad: float, trains_mtp: bool = False) -> float:
    """Take one optimizer step, unless a gradient is not finite on some rank. Collective over the world.

    Args:
        optimizer: with gradients of the whole step in the model's buffers.
        clip_grad: largest gradient norm; 0 does not clip. MTP layers are clipped by a norm of their own, so that their
            gradient does not shorten the policy's step.
        trains_mtp: whether there are MTP layers.

    Returns:
        The norm before clipping of the gradient without MTP layers; the step was taken if and only if it is finite.
    """
    optimizer.prepare_grads()
    policys, of_mtp = _gradients(optimizer)
    norm, mtp_norm = float(optimizer.get_grad_norm()), _mtp_norm(optimizer) if trains_mtp else 0.0
    if dist.get_world_size() > 1 and not _finite_on_all([*policys, *of_mtp]):
        norm = math.nan
    if not math.isfinite(mtp_norm):
        norm = mtp_norm
    if math.isfinite(norm):
        for gradients, own in ((policys, norm), (of_mtp, mtp_norm)):
            if gradients and 0 < clip_grad < own:
                torch._foreach_mul_(gradients, clip_grad / (own + 1e-6))
        optimizer.step_with_ready_grads()
    if (scaler := loss_scaler(optimizer)) is not None:
        scaler.settle(overflow=not math.isfinite(norm))
    return norm


def _gradients(optimizer: MegatronOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's gradients: (those of the policy, those of MTP layers)."""
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = getattr(parameter, "decoupled_grad", None)  # float32, where the parameter is in bfloat16
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found[getattr(parameter, GRAD_NORM_GROUP_ATTR, None) == MTP_GRAD_NORM_GROUP].append(gradient)
    return found


def _mtp_norm(optimizer: MegatronOptimizer) -> float:
    """Return the norm of the gradient of MTP layers."""
    norms = [
        get_grad_norm_fp32(
            each.get_grads_for_grad_norm(MTP_GRAD_NORM_GROUP),
            grad_stats_parallel_group=each.get_grad_stats_parallel_group(),
        )
        for each in optimizer.chained_optimizers
    ]
    return math.hypot(*(float(norm) for norm in norms))


def _finite_on_all(gradients: list[torch.Tensor]) -> bool:
    """Return whether gradients are finite on every rank: the norm leaves out what tensor-parallel ranks hold alike."""
    bad = torch.zeros((), device=process_groups.device())
    if gradients:  # a rank of a distributed optimizer may have none
        bad += ~torch.stack([gradient.sum() for gradient in gradients]).isfinite().all()
    dist.all_reduce(bad)
    return float(bad) == 0.0
