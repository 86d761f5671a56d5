"""The loss of supervised fine-tuning: cross-entropy of the answers' tokens."""

from __future__ import annotations

from typing import Any

import torch
from slime_core.protocols import TokenView
from torch import Tensor


def sft_loss(view: TokenView, advantages: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these tokens in −log π, and no metrics besides.

    Args:
        view: reads `log_probs`, `loss_mask`, `weights`. With the reducer `token-mean` the loss is the mean over the
            trained tokens of an optimizer step, with `sample-mean` that over samples of their means.
        advantages: not read.

    Source: slime/backends/megatron_utils/loss.py `sft_loss_function`.
    """
    # A context's token may have no probability at all, and 0 · inf would be NaN.
    token_loss = torch.where(view.loss_mask > 0, -view.log_probs, torch.zeros_like(view.log_probs))
    return view.reduce(token_loss), {}
