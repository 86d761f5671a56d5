"""The state that an optimizer's first step would begin with, for checkpoints: it is looked for when one is read or written.

Until then an optimizer has none, and gets none as long as every step is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers, one of each of Megatron's; `HybridDeviceOptimizer` is one that has others."""
    return [each.optimizer for each in optimizer.chained_optimizers if each.optimizer is not None]


def counts_for_each(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the number of steps is in each parameter's state.

    It is in those of torch's AdamW. TransformerEngine's FusedAdam, which Megatron takes where it is installed, has it in the
    groups of parameters, a whole number, and refuses states that have it.
    """
    return isinstance(optimizer, torch.optim.Adam | HybridDeviceOptimizer)


def fill(optimizer: MegatronOptimizer) -> None:
    """Give all parameters the state that the first step would begin with; what has a state keeps it."""
    for each in optimizer.chained_optimizers:
        if each.optimizer is not None:
            each.init_state_fn(each.optimizer, each.config)


def fill_moments(optimizer: torch.optim.Optimizer, _config: OptimizerConfig | None = None) -> None:
    """Give AdamW's parameters moments of zero, and no step; what has a state keeps it."""
    for each in _parts(optimizer):
        for parameter in _parameters(each):
            if not each.state[parameter]:
                names = ("exp_avg", "exp_avg_sq")
                each.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
                if counts_for_each(each):
                    each.state[parameter]["step"] = torch.zeros((), device=parameter.device)
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer._sync_sub_optimizers_state_to_hdo()


def fill_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give an AdamW without parameters a number of steps, which Megatron 0.19.2 wants to write of each.

    Of ranks that share an optimizer's state one may have none of it, such as that of experts on a stage without any.
    """
    if counts_for_each(optimizer) and not any(True for _ in _parameters(optimizer)):
        nobody: Any = "no parameter"  # torch keeps the state of what is not a tensor, and reads nothing of it
        optimizer.state.setdefault(nobody, {"step": torch.zeros(())})


def fill_momentum(optimizer: torch.optim.Optimizer, _config: OptimizerConfig | None = None) -> None:
    """Give descent the momentum that its first step would begin with."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def own_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter a counter of steps of its own: Megatron gives all of them one, which each would count up.

    And put the state of a `HybridDeviceOptimizer` where its parameters are: without TransformerEngine Megatron 0.19.2 takes
    its part on the GPU for the one on the host, both being torch's AdamW.
    """
    for each in _parts(optimizer):
        for parameter, values in each.state.items():
            if "step" in values:
                values["step"] = values["step"].clone()
            if each is not optimizer:
                values.update({name: value.to(parameter.device) for name, value in values.items()})


def _parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold states: the optimizer itself, or those that it is made of."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
