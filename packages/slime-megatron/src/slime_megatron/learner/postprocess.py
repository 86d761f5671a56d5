"""`--rollout-data-postprocess-path`: a user's function between the advantages of a step and its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from slime_core.errors import TrainerError
from slime_core.samples import TrainBatch
from torch import Tensor

from slime_megatron.batch.token_columns import TokenColumns

_WHO = "the function of --rollout-data-postprocess-path"
#: Columns of a step that the function sees where they are known, and may not change.
_SEEN = {
    "old_log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "values": "values",
}


def postprocess(
    function: Callable[..., None],
    settings: Any,
    batch: TrainBatch,
    columns: TokenColumns,
    advantages: Tensor,
    returns: Tensor,
) -> tuple[TokenColumns, Tensor, Tensor]:
    """Call the function with all samples of a step; returns columns, advantages and returns as it leaves them.

    It gets `(args, rollout_id, rollout_data)`, the settings, the step counted from 0, and a dict of lists with an entry for each
    sample: tensors float32 [response_length] under `loss_masks`, `advantages`, `returns` and what is known of `log_probs`,
    `ref_log_probs`, `rollout_log_probs`, `teacher_log_probs` and `values`; `tokens` int32; numbers under `total_lengths`,
    `response_lengths`, `rewards`, `raw_reward` and `sample_indices`. It may change advantages, returns and loss masks, in place or
    for others. A token whose mask it sets to 0 is not trained on; the weights of the others stay.

    Args:
        function: the user's.
        settings: its `args`.
        batch: samples of the step.
        columns: theirs.
        advantages: [T].
        returns: [T].

    Raises:
        TrainerError: the function raised, or left something of another shape, or a mask of 1 where it was 0.
    """
    lengths = batch.response_lengths.tolist()

    def parts(column: Tensor) -> list[Tensor]:
        return list(column.detach().clone().split(lengths))

    data: dict[str, Any] = {
        "tokens": list(torch.from_numpy(batch.tokens.copy()).split(batch.lengths.tolist())),
        "total_lengths": batch.lengths.tolist(),
        "response_lengths": lengths,
        "rewards": batch.rewards.tolist(),
        "raw_reward": batch.raw_rewards.tolist(),
        "sample_indices": batch.sample_ids.tolist(),
        "loss_masks": parts(columns.loss_mask),
        "advantages": parts(advantages),
        "returns": parts(returns),
    }
    seen = {name: getattr(columns, field) for field, name in _SEEN.items()}
    data |= {name: parts(column) for name, column in seen.items() if column is not None}
    try:
        function(settings, batch.step - 1, data)
    except Exception as error:
        raise TrainerError(f"step {batch.step}: {_WHO} raised {type(error).__name__}: {error}") from error
    mask = _joined(data, "loss_masks", lengths, columns.loss_mask, batch.step)
    if not bool(((mask == 0) | (mask == columns.loss_mask)).all()):
        raise TrainerError(
            f"step {batch.step}: {_WHO} left a loss mask that is neither 0 nor what it was; wanted tokens masked, none added"
        )
    changed = replace(columns, loss_mask=mask, weights=columns.weights * (mask > 0))
    return (
        changed,
        _joined(data, "advantages", lengths, advantages, batch.step),
        _joined(data, "returns", lengths, returns, batch.step),
    )


def _joined(data: dict[str, Any], name: str, lengths: Sequence[int], like: Tensor, step: int) -> Tensor:
    """Return the parts of a column as one again."""
    parts = data.get(name)
    try:
        device = like.device  # a part that the function put in another's place may be on the host
        tensors = [torch.as_tensor(part, device=device) for part in parts] if isinstance(parts, list) else []
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainerError(f"step {step}: {_WHO} left {name} that are no tensors ({error})") from error
    found = [list(tensor.shape) for tensor in tensors]
    if found != [[length] for length in lengths]:
        raise TrainerError(
            f"step {step}: {_WHO} left {name} of the shapes {str(found)[:60]}; wanted the lengths {str(lengths)[:60]}"
        )
    joined = torch.cat(tensors).to(like)
    if not bool(joined.isfinite().all()):
        raise TrainerError(f"step {step}: {_WHO} left {name} that are not finite; wanted numbers")
    return joined
