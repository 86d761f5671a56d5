"""Views of tokens as functions of the reference system get them: a list for each column, an entry a sample.

Imports torch, when it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.errors import PluginError
from slime_core.protocols import TokenView

#: Column of a view -> its name in their data.
_COLUMNS = {
    "old_log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "values": "values",
}


def lengths_of(view: TokenView) -> list[int]:
    """Return the tokens of each sample in a view; samples of which it has none are left out."""
    import torch

    counts = torch.unique_consecutive(view.sample_of_token, return_counts=True)[1]
    return [int(one) for one in counts.tolist()]


def columns_of(view: TokenView) -> dict[str, Any]:
    """Return the samples of a view as they are there: a list for each column, an entry a sample."""
    import torch

    lengths = lengths_of(view)
    samples = torch.unique_consecutive(view.sample_of_token)
    data: dict[str, Any] = {
        "response_lengths": lengths,
        "loss_masks": list(view.loss_mask.split(lengths)),
        "rewards": view.rewards[samples].tolist(),
        "unconcat_tokens": None,
    }
    for ours, theirs in _COLUMNS.items():
        column = getattr(view, ours)
        if column is not None:
            data[theirs] = list(column.split(lengths))
    if view.total_lengths is not None:
        data["total_lengths"] = view.total_lengths[samples].tolist()
    if view.group_ids is not None:
        data["group_indices"] = view.group_ids[samples].tolist()
    if view.train_metadata is not None:
        data["metadata"] = [view.train_metadata[place] for place in samples.tolist()]
    return data


def divergence_of(view: TokenView, *, kl_coef: float, kl_loss_type: str) -> list[Any]:
    """Return what estimates KL(π_old || π_ref) at each token, an entry a sample; zeros where the coefficient is 0, as there.

    Where the mask is 0 it is what the columns make it, as there.
    """
    import torch

    if kl_coef == 0:
        return list(torch.zeros_like(view.loss_mask).split(lengths_of(view)))
    from slime_compat.views.training.formulae import compute_approx_kl

    kl = compute_approx_kl(view.old_log_probs, view.ref_log_probs, kl_loss_type)
    return list(kl.split(lengths_of(view)))


@contextlib.contextmanager
def naming_columns(who: str, columns: Mapping[str, Any]) -> Iterator[None]:
    """Say which columns there are where a function asks for another.

    Args:
        who: how messages call the function.
        columns: what it is given.

    Raises:
        PluginError: the block raised KeyError.
    """
    there = ", ".join(sorted(name for name, column in columns.items() if column is not None))
    try:
        yield
    except KeyError as error:
        raise PluginError(
            f"{who}: raised KeyError: {error}; the columns that it is given are {there}"
        ) from error


def sequences_of(view: TokenView) -> tuple[Any, dict[str, Any]]:
    """Return the logits [1, S, vocabulary] of the samples that `columns_of` returns, and the ids of these samples."""
    import torch

    totals = view.total_lengths.tolist()
    samples = torch.unique_consecutive(view.sample_of_token).tolist()
    logits, ids = view.sequence_logits, list(view.sequence_tokens.split(totals))
    if len(samples) < len(totals):
        parts = logits.split(totals)
        logits = torch.cat([parts[i] for i in samples])
    ids = [ids[i] for i in samples]
    return logits[None], {"unconcat_tokens": ids, "tokens": torch.cat(ids)[None]}
