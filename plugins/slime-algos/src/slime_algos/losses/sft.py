"""The loss of supervised fine-tuning: cross-entropy of the answers' tokens."""

from __future__ import annotations

from typing import Any

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.terms.masked import trained_only


def sft_loss(view: TokenView, advantages: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these tokens in −log π, and no metrics besides.

    Args:
        view: reads `log_probs`, `loss_mask`, `weights`. With the reducer `token-mean` the loss is the mean over the
            trained tokens of an optimizer step, with `sample-mean` that over samples of their means.
        advantages: not read.

    Source: slime/backends/megatron_utils/loss.py `sft_loss_function`.
    """
    view = trained_only(view)
    return -view.reduce(view.log_probs), {}
