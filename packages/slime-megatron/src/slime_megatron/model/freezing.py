"""Freezing of parameters by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from slime_core.errors import TrainerError
from torch import Tensor
from torch.nn import Module

#: The name of a layer's parameter, without the layer's number.
_LAYER = re.compile(r"(.*?\blayers\.)\d+(\..*)")


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
    trained = _trained(names, only_train, frozen)
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


def trains_layers_alike(
    names: Collection[str], *, only_train: Sequence[str] = (), frozen: Sequence[str] = ()
) -> bool:
    """Return whether each of the whole model's layers that have a parameter trains it, or none does; see `freeze`."""
    trained, of_layers = _trained(names, only_train, frozen), dict[str, set[bool]]()
    for name in names:
        if (in_layer := _LAYER.fullmatch(name)) is not None:
            of_layers.setdefault(f"{in_layer[1]}{in_layer[2]}", set()).add(name in trained)
    return all(len(found) == 1 for found in of_layers.values())


def _trained(names: Collection[str], only_train: Sequence[str], frozen: Sequence[str]) -> set[str]:
    trained = set(names)
    if only_train:
        trained &= _matched(only_train, names, setting="only_train_params_name_list")
    return trained - _matched(frozen, names, setting="freeze_params_name_list")


def _matched(patterns: Iterable[str], names: Collection[str], *, setting: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if re.search(pattern, name)}
        if not matched:
            some = ", ".join(list(names)[:3])
            raise TrainerError(
                f"{setting}: {pattern!r} matches no parameter; wanted a part of a Megatron name, such as {some}"
            )
        found |= matched
    return found
