"""SGLang's custom weight loader (`--custom-weight-loader`): takes a staged update in, and proves what it did.

Runs inside the server. SGLang ends the whole server when a loader raises, so this one answers through the
staging folder instead. It checks every tensor before it writes any: a refused update leaves the old weights whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from slime_models.fingerprint import fingerprint
from torch import Tensor

from slime_sglang.staging import Staged, Verdict

#: SGLang's modules that stack several Hugging Face matrices: leaf name -> leaf names, top to bottom.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the update whose folder is the name of the one (empty) tensor given."""
    (folder, _), *_ = named_tensors
    staged = Staged(Path(folder))
    staged.answer(_take(model, staged))


def _take(model: Any, staged: Staged) -> Verdict:
    changed = [name for name, t in staged.tensors() if fingerprint(t) != staged.entries[name].fingerprint]
    if changed:
        return Verdict(f"{', '.join(changed[:5])}: the bytes that arrived are not those that were sent", {})
    with torch.no_grad():
        model.load_weights(staged.tensors())
        shapes = {name: entry.shape for name, entry in staged.entries.items()}
        held = {name: fingerprint(tensor) for name, tensor in held_tensors(model, shapes) if name in shapes}
    return Verdict(None, held)


def held_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters under their Hugging Face names, as views.

    Stacked matrices are cut at the rows that `shapes` gives; rows that pad a vocabulary are left out.
    """
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{kind}" for part in _STACKED.get(leaf, ())] or [name]
        start = 0
        for part in names:
            rows = shapes[part][0] if part in shapes else len(parameter)
            yield part, parameter[start : start + rows]
            start += rows
