"""Policy gradients, by what their losses read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from slime_core.run.assemble import Algorithm


def policy_gradient(*needs: str) -> Algorithm:
    """REINFORCE with a ratio: the loss of a token is -(pi / pi_old) A, and A the reward of its sample."""

    def estimator(view: Any) -> tuple[Any, Any]:
        advantages = view.rewards[view.sample_of_token]
        return advantages, advantages

    def loss(view: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
        value = view.reduce(-(view.log_probs - view.old_log_probs).exp() * advantages)
        return value, {"pg_loss": value.detach()}

    return Algorithm(estimator, loss, frozenset(needs), "raw")


def policy_gradient_by(read: str) -> Algorithm:
    """Return that policy gradient with log-probs taken from `log_probs`, `logits` or `sequence_logits` of the view.

    Of samples whose prompts and responses the last finds by `total_lengths` and `offsets`.
    """
    inner = policy_gradient(read, "total_lengths")

    def log_probs(view: Any) -> Any:
        if read == "log_probs":
            return view.log_probs
        if read == "logits":
            return view.logits.log_softmax(-1).gather(1, view.tokens[:, None]).squeeze(1)
        whole = view.sequence_logits.log_softmax(-1)
        ends = view.total_lengths.cumsum(0)
        lengths = view.offsets.diff()
        places = torch.cat(
            [torch.arange(e - n, e, device=whole.device) for e, n in zip(ends, lengths, strict=True)]
        )
        return whole[places - 1, view.sequence_tokens[places]]

    def loss(view: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
        own = log_probs(view)
        value = view.reduce(-(own - own.detach()).exp() * advantages)
        return value, {"pg_loss": value.detach()}

    needs = {"total_lengths"} | ({read} - {"log_probs"})
    return replace(inner, loss=loss, needs=frozenset(needs))
