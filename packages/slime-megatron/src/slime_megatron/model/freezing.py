"""Freezing of parameters by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slime_core.errors import TrainerError
from torch import Tensor
from torch.nn import Module

from slime_megatron.settings.trained_names import trained_names


def freeze(
    model: Module,
    own: Mapping[str, Tensor],
    names: Collection[str],
    *,
    only_train: Sequence[str] = (),
    frozen: Sequence[str] = (),
) -> None:
    """Freeze parameters.

    A pattern is a regular expression that is searched for in Megatron's names, such as
    `decoder.layers.3.mlp.linear_fc1.weight`. Fused weights (qkv; gate and up) are trained or frozen whole.

    Args:
        model: this rank's part of the model; parameters that are frozen already stay so.
        own: this rank's weights, by their names in the whole model.
        names: names of the whole model's parameters.
        only_train: when given, parameters that none of these matches are frozen.
        frozen: parameters that one of these matches are frozen.

    Raises:
        TrainerError: a pattern matches nothing, or nothing is left to train.
    """
    trained = trained_names(names, only_train=only_train, frozen=frozen)
    if not trained:
        raise TrainerError("freeze_params_name_list matches every parameter; leave some to train")
    for name, parameter in own.items():
        if name in names and name not in trained:
            parameter.requires_grad = False
    embedding: Any = getattr(model, "embedding", None)
    config: Any = getattr(model, "config", None)
    if embedding is not None and config.recompute_granularity == "full":
        # A layer whose input wants no gradient is recomputed without any, its weights' included.
        embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
