"""Entry point of the platform `cpu_torch`: whether SGLang runs on plain PyTorch here. Every process of SGLang imports it."""

from __future__ import annotations

import os

#: Our name in SGLang's entry-point group `sglang.srt.platforms`.
PLATFORM_NAME = "cpu_torch"


def is_active() -> bool:
    """Return whether `SGLANG_PLATFORM` names this platform and this process sees no GPU."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return False
    import torch

    return not torch.cuda.is_available()


def activate() -> str | None:
    """Return the class of SGLang's platform on plain PyTorch, or None where it does not apply.

    Source: the entry-point group `sglang.srt.platforms`, sglang/srt/platforms/__init__.py of SGLang 0.5.23. There a
    None is an error if `SGLANG_PLATFORM` asked for us, and means "not this one" otherwise.
    """
    return "slime_sglang.inside.cpu_platform.TorchPlatform" if is_active() else None
