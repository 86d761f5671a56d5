"""`ResponseTokens`: the tokens of a micro-batch whose log-probs the model is to return."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from slime_megatron.batch.logit_rows import LogitRows
from slime_megatron.batch.mtp_inputs import MtpRow
from slime_megatron.batch.sampling_mask import SamplingMask


@dataclass(frozen=True)
class ResponseTokens:
    """The R tokens whose log-probs the model is to return, of which each context-parallel rank has r.

    Without context parallelism r are those that differ: a token that samples share is predicted once.
    """

    rows: Tensor
    """int64 [r]: packed position whose hidden state predicts each token, that is the position before it."""
    targets: Tensor
    """int64 [r]: their ids."""
    temperature: float
    """Divides the logits."""
    with_entropy: bool
    """Whether entropies are wanted, too."""
    with_sum_pi_squared: bool
    """Whether sums of squared probabilities are wanted, too, where no gradient is."""
    vocab_size: int
    """Ids of the model; columns of logits beyond are padding."""
    n_tokens: int
    """R."""
    places: Tensor | None = None
    """int64 [r]: indices of this rank's tokens among the R; None where it has all."""
    repeats: Tensor | None = None
    """int64 [R]: which of the r each token is; None where each is one of its own."""
    context: dist.ProcessGroup | None = None
    """The context-parallel group, whose ranks have the others."""
    mtp_rows: tuple[MtpRow, ...] = ()
    """Inputs of each MTP layer; empty where none is trained."""
    logits: LogitRows | None = None
    """Of which tokens a loss reads logits; None where it reads none."""
    sampling_mask: SamplingMask | None = None
    """The ids that top-p and top-k left for each of the r tokens; None without either."""
