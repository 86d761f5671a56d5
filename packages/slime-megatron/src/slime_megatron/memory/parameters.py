"""How many numbers a rank of each pipeline stage holds, and how many of them are trained."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_megatron.memory.layout import Layout
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily
    from slime_models.family.weights import Weight

#: How `Rule.shard` is spelt of a tensor that every tensor-parallel rank holds whole, and of one that is cut by columns.
_WHOLE, _COLUMNS = "none", "columns"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EMBEDDING = "embedding."


@dataclass(kw_only=True)
class Parameters:
    """Counts of numbers that one rank holds."""

    shared: int = 0
    """Outside of experts, float32 buffers apart."""
    experts: int = 0
    """Of experts."""
    trained: int = 0
    """Those outside of experts that have gradients."""
    trained_experts: int = 0
    """Those of experts that have."""
    buffers: int = 0
    """float32 buffers, which have none."""

    @property
    def all(self) -> int:
        """Those of the model's dtype."""
        return self.shared + self.experts

    @property
    def all_trained(self) -> int:
        """Those with gradients."""
        return self.trained + self.trained_experts


def parameters_of_stages(
    family: ModelFamily,
    architecture: Architecture,
    section: MegatronSection,
    lora: LoraSection,
    layout: Layout,
) -> list[Parameters]:
    """Return the counts of a rank of each pipeline stage; the ranks of a stage hold as many each.

    Args:
        family: of the model.
        architecture: with its vocabulary padded, and with MTP layers where they are trained.
        section: what is frozen.
        lora: the adapters, beside which all else is frozen.
        layout: how many ranks share what.
    """
    stages = [Parameters() for _ in range(layout.pipeline)]
    weights = family.weights(architecture)
    trained = _trained(family.parameter_names(architecture), section, lora)
    for name, weight in weights.items():
        count = math.prod(weight.shape) / _ranks_of(weight, layout)
        for stage in _stages_of(name, architecture, layout):
            _add(stages[stage], weight, count, name in trained)
            if lora.rank is not None:
                _add_adapter(stages[stage], name, weight, lora, layout)
    return stages


def _trained(names: Collection[str], section: MegatronSection, lora: LoraSection) -> set[str]:
    """Return the names of the parameters that are trained; adapters are none of them."""
    if lora.rank is not None:
        return set()
    only, frozen = section.only_train_params_name_list, section.freeze_params_name_list
    kept = {name for name in names if not only or any(re.search(pattern, name) for pattern in only)}
    return {name for name in kept if not any(re.search(pattern, name) for pattern in frozen)}


def _ranks_of(weight: Weight, layout: Layout) -> int:
    """Return among how many ranks all tensors of a weight's kind are shared out."""
    cut = weight.rule.shard.value != _WHOLE
    if weight.expert is not None:
        return layout.experts * (layout.expert_tensor if cut else 1)
    return layout.tensor if cut else 1


def _stages_of(name: str, architecture: Architecture, layout: Layout) -> Sequence[int]:
    """Return the pipeline stages that hold a tensor: one, but for an embedding that the last stage reads, too."""
    last = layout.pipeline - 1
    layer = _LAYER.match(name)
    if layer:
        return [int(layer[1]) * layout.pipeline // architecture.num_layers]
    if not name.startswith(_EMBEDDING):
        return [last]
    copied = architecture.tie_word_embeddings or (architecture.holds_mtp and architecture.mtp_num_layers > 0)
    return [0, last] if copied and last > 0 else [0]


def _add(found: Parameters, weight: Weight, count: float, trained: bool) -> None:
    number = round(count)
    if weight.rule.buffer:
        found.buffers += number
    elif weight.expert is not None:
        found.experts += number
        found.trained_experts += number * trained
    else:
        found.shared += number
        found.trained += number * trained


def _add_adapter(found: Parameters, name: str, weight: Weight, lora: LoraSection, layout: Layout) -> None:
    """Add the two matrices beside a linear layer: of the one that is cut as the layer is, each rank has its part."""
    parts = name.split(".")
    if lora.rank is None or parts[-1] != "weight" or not lora.targets(parts[-2]):
        return
    rows, columns = weight.shape
    expert = weight.expert is not None
    tensor = layout.expert_tensor if expert else layout.tensor
    if weight.rule.shard.value == _WHOLE:
        tensor = 1
    by_columns = weight.rule.shard.value == _COLUMNS
    inner = columns / tensor if by_columns else columns
    outer = rows if by_columns else rows / tensor
    count = round(lora.rank * (inner + outer) / (layout.experts if expert else 1))
    if expert:
        found.experts += count
        found.trained_experts += count
    else:
        found.shared += count
        found.trained += count
