"""The optimal token baseline: for each place in a response a baseline of its own, weighed by the gradients so far."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sample_sums import running_sums, trained_tokens
from slime_algos.terms.sums_by_id import SumsById


@estimator(reward_transform="raw", reads={"group_ids", "old_log_probs", "sum_pi_squared"})
def optimal_token_baseline(
    view: TokenView, kl: Tensor, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Give token t of a sample G_t − Σ W_t G_t / Σ W_t, the sums over the samples of its group that have a token t.

    G_t is the sample's reward less the penalties still to come, W_t = Σ_{k ≤ t} (1 − 2 π_k + Σ_v π_k(v)²): the
    squared gradient of each token's log-prob with respect to its logits, added up. t counts trained tokens, so that
    turns of different length stand beside each other. Under importance weights ρ a term of W_t is ρ_k² as large, because
    the gradient that it measures is ρ_k times as large. A token whose place no other sample of its group reaches gets
    G_t, as in verl; so does every token of a group of one.

    Args:
        view: reads `rewards`, `group_ids`, `loss_mask`, `offsets`, `old_log_probs`, `sum_pi_squared`.
        kl: [T] penalty of each token.
        importance: [T] importance weight of each token; None where there are none.

    Returns:
        (advantages [T], returns [T]); 0 on tokens that are not trained on.

    Source: verl 0.9.1 `compute_multi_turn_optimal_token_baseline_advantage`, and for masks without holes
    `compute_optimal_token_baseline_advantage`, whose `rollout_is_weights` multiply the loss later, as ours do.
    """
    positions, offsets = trained_tokens(view.loss_mask, view.offsets)
    sample = view.sample_of_token[positions]
    likely = view.old_log_probs[positions].clamp(max=0).exp()
    energy = 1 - 2 * likely + view.sum_pi_squared[positions]
    if importance is not None:
        energy = energy * importance[positions] ** 2
    # Rounding, or log-probs of an engine, may make it negative.
    weights = running_sums(energy.clamp(min=0), offsets)
    returns = outcome(view, view.rewards, kl)[0][positions]

    place = torch.arange(len(positions), device=positions.device) - offsets[:-1][sample]
    _, group = view.group_ids.unique(return_inverse=True)
    alike = SumsById(group[sample] * len(positions) + place)  # tokens of one place in their group's samples
    ahead = alike.ahead_of_first(returns)
    ahead = ahead - alike.total(weights * ahead) / alike.total(weights).clamp(min=1e-8)
    advantages = torch.where(alike.size == 1, returns, ahead)
    zeros = torch.zeros_like(kl)
    return zeros.index_copy(0, positions, advantages), zeros.index_copy(0, positions, returns)
