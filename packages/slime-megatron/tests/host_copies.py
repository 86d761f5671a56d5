"""What is on the trainer's device, on the host: of rank jobs and of tests, which import it in different ways."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def on_host(value: Any) -> Any:
    """Return a value with all tensors in it on the CPU, their gradients' graph included; those that are there as they are.

    Looks into dataclasses, dicts, lists and tuples.
    """
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: on_host(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on_host(getattr(value, field.name)) for field in fields(value)})
    return value
