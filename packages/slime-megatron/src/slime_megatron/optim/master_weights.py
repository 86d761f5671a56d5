"""Whether the weights of a model are made of the master weights that an optimizer has of them, as they are after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_megatron.optim.optimizer import MASTERS


def made_of(weight: Tensor, master: Tensor) -> Tensor:
    """Return whether a weight is its master weight, cast: [] bool, on the weight's device.

    One unit in the last place is nothing: TransformerEngine, which keeps the two as upper and lower half of a number, rounds
    halves otherwise.
    """
    limits = torch.finfo(weight.dtype)
    cast, own = master.to(weight.device).to(weight.dtype).float(), weight.detach().float()
    least = limits.smallest_normal * limits.eps
    return torch.isclose(cast, own, rtol=limits.eps, atol=least, equal_nan=True).all()


def not_made_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the weights of (weight, whether it is made of its master weight) that are not."""
    alike = torch.stack([same for _, same in pairs]).tolist() if pairs else []
    return [weight for (weight, _), same in zip(pairs, alike, strict=True) if not same]


def weights_unlike_masters(optimizer: Any, saved: dict[Any, Any]) -> list[Tensor]:
    """Return the weights of a plain optimizer that are not made of the master weights that were read for it.

    Args:
        optimizer: one of Megatron's chained ones.
        saved: what was read for it. Of a float32 model, whose weights are their own masters, those of a distributed optimizer
            are in its state as `param`, and are taken out.
    """
    weights = [weight for group in getattr(optimizer, "float16_groups", ()) for weight in group]
    masters = [master for group in saved.get(MASTERS, ()) for master in group]
    pairs = list(zip(weights, masters, strict=True))
    own = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, tensors in saved.get("state", {}).items():
        if isinstance(tensors, dict) and "param" in tensors:
            pairs.append((own[number], tensors.pop("param")))
    return not_made_of([(weight, made_of(weight, master)) for weight, master in pairs])
