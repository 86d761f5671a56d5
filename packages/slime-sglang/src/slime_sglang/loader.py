"""SGLang's custom weight loaders (`--custom-weight-loader`): check a staged update, take it in, prove what was done.

They run inside the server. SGLang ends the whole server when a loader raises, so these answer through the staging
folder. Checking is a call of its own, because SGLang counts a version as reached when the call that names it returns.
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


CHECK, LOAD = f"{__name__}.check", f"{__name__}.load"


def check(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Check the bytes of the update whose folder is the name of the one (empty) tensor given; writes no weight."""
    staged = _staged(named_tensors)
    changed = [name for name, t in staged.tensors() if fingerprint(t) != staged.entries[name].fingerprint]
    error = (
        f"{', '.join(changed[:5])}: the bytes that arrived are not those that were sent" if changed else None
    )
    staged.answer(Verdict(error, {}))


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the update, and answer with fingerprints of what the model's parameters hold then."""
    staged = _staged(named_tensors)
    with torch.no_grad():
        model.load_weights(staged.tensors())
        shapes = {name: entry.shape for name, entry in staged.entries.items()}
        held = {name: fingerprint(tensor) for name, tensor in held_tensors(model, shapes) if name in shapes}
    staged.answer(Verdict(None, held))


def _staged(named_tensors: Sequence[tuple[str, Tensor]]) -> Staged:
    (folder, _), *_ = named_tensors
    return Staged(Path(folder))


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
