"""Samples."""

from typing import Any

from slime_compat.views.running.absent import lacking
from slime_compat.views.samples.sample import ReferenceSample as Sample

#: Columns of a training batch by name.
RolloutBatch = dict[str, list[Any]]

__all__ = ["RolloutBatch", "Sample"]
__getattr__ = lacking(
    __name__,
    {
        "ParamInfo": "weights are sent by transports; use slime_core.protocols",
        "MultimodalTypes": "kinds of inputs are named by --multimodal-keys: image",
        "MultimodalType": "kinds of inputs are named by --multimodal-keys: image",
    },
)
