"""Estimated size of a checkpoint, from the model's folder and the settings of the optimizer."""

from __future__ import annotations

import json
import math
from pathlib import Path

from slime_core.config.build import BuildContext
from slime_core.config.derive import compute_dtype
from slime_core.run.assemble import algorithm

from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection


def checkpoint_bytes(build: BuildContext) -> int | None:
    """Return about how many bytes one checkpoint takes; None where the model's folder has no safetensors.

    A weight that is trained is kept in the dtype that is computed in, where that is not float32 as a float32 copy too, and
    with the optimizer's moments; of a frozen one, under LoRA, only the first. A critic is as large as the policy.
    """
    weights = _n_weights(build.model_path)
    if weights is None:
        return None
    section = build.section(MegatronSection)
    held = 4 if compute_dtype(build.settings.train) == "float32" else 2
    moments = 8 if section.optimizer == "adam" else 4 * (section.sgd_momentum > 0)
    trained = held + moments + (4 if held == 2 else 0)
    of_policy = held if build.section(LoraSection).rank is not None else trained
    of_critic = trained if "values" in algorithm(build.settings, build.registry).needs else 0
    return weights * (of_policy + of_critic)


def _n_weights(folder: Path) -> int | None:
    """Return how many numbers the safetensors of a folder hold, by their headers: a length of 8 bytes, then JSON."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        count += sum(math.prod(entry["shape"]) for entry in header.values())
    return count or None
