"""Which parameters are trained, by the patterns of `--only-train-params-name-list` and `--freeze-params-name-list`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from slime_core.errors import TrainerError

#: The name of a layer's parameter, without the layer's number.
_LAYER = re.compile(r"(.*?\blayers\.)\d+(\..*)")


def trains_layers_alike(
    names: Collection[str], *, only_train: Sequence[str] = (), frozen: Sequence[str] = ()
) -> bool:
    """Return whether each of the whole model's layers that have a parameter trains it, or none does.

    Raises:
        TrainerError: a pattern matches nothing.
    """
    trained = trained_names(names, only_train=only_train, frozen=frozen)
    of_layers: dict[str, set[bool]] = {}
    for name in names:
        if (in_layer := _LAYER.fullmatch(name)) is not None:
            of_layers.setdefault(f"{in_layer[1]}{in_layer[2]}", set()).add(name in trained)
    return all(len(found) == 1 for found in of_layers.values())


def trains_alike_in_stages(
    names: Collection[str], *, only_train: Sequence[str] = (), frozen: Sequence[str] = ()
) -> bool:
    """Return whether pipeline stages train something of layers, and the same of all, however layers are shared out among stages.

    A stage may have nothing of it, such as experts, which the first layers of some models lack, or MTP layers, which are the last's.

    Raises:
        TrainerError: a pattern matches nothing.
    """
    patterns = {"only_train": only_train, "frozen": frozen}
    in_layers = any(map(_LAYER.fullmatch, trained_names(names, **patterns)))
    return in_layers and trains_layers_alike(names, **patterns)


def trained_names(
    names: Collection[str], *, only_train: Sequence[str] = (), frozen: Sequence[str] = ()
) -> set[str]:
    """Return those of the whole model's parameters that are trained; see `model.freezing.freeze`.

    Raises:
        TrainerError: a pattern matches nothing.
    """
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
