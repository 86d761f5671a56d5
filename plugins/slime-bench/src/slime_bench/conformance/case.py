"""Random ragged inputs: ours flat with offsets, the peers' padded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from slime_core.protocols import Reducer, ReductionView, TokenView
from torch import Tensor

GROUPS = (3, 3, 3, 3, 3, 8, 8, 8, 8, 8, 5, 5, 5, 5, 5)
"""Prompt group of each sample; equal sizes, because TRL and OpenRLHF reshape."""
PARTS = ("accuracy", "format", "brevity")


@dataclass(frozen=True)
class Case:
    """The same batch in both layouts. Every sample has a trained token; masks have holes; some ratios are
    large, and the reference model holds some tokens likely that the policy does not."""

    view: TokenView
    """Flat. `log_probs` and `new_values` want gradients; `rewards` and `reward_parts` are as scored."""
    advantages: Tensor
    """[T] the same for each token of a sample."""
    returns: Tensor
    """[T]"""

    @classmethod
    def random(cls, seed: int, dtype: torch.dtype = torch.float64) -> Case:
        """Return the case of a seed."""
        rng = np.random.default_rng(seed)
        n = len(GROUPS)
        lengths = rng.integers(2, 12, n)
        masks = [np.where(rng.random(length) < 0.25, 0.0, 1.0) for length in lengths]
        for own in masks:
            own[0] = 1.0
        total = int(lengths.sum())

        def column(scale: float = 1.0) -> Tensor:
            return torch.as_tensor(rng.normal(size=total) * scale, dtype=dtype)

        def seldom(scale: float) -> Tensor:
            """Return a tenth of the tokens far from 0, the others 0."""
            return column(scale) * torch.as_tensor(rng.random(total) < 0.1)

        unlikely = seldom(3.0).abs()
        log_probs = -column().abs() - 0.1 - unlikely
        sample = torch.repeat_interleave(torch.arange(n), torch.as_tensor(lengths))
        credits = torch.as_tensor(rng.normal(size=n), dtype=dtype)[sample]
        mask = torch.as_tensor(np.concatenate(masks), dtype=dtype)
        old = (log_probs + column(0.2) + seldom(3.0)).clamp(max=-0.01)
        view = TokenView(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(lengths).cumsum(0)]),
            sample_of_token=sample,
            loss_mask=mask,
            weights=mask,
            rewards=torch.as_tensor(rng.integers(0, 3, n) / 2 + (rng.random(n) < 0.2) * 0.1, dtype=dtype),
            old_log_probs=old,
            log_probs=log_probs.clone().requires_grad_(),
            entropy=column().abs(),
            rollout_log_probs=(old + column(0.3)).clamp(max=-0.01),
            sum_pi_squared=old.exp() ** 2 + (1 - old.exp()) ** 2 / 4,  # four other ids, equally likely
            ref_log_probs=(log_probs + column(0.4) + unlikely).clamp(max=-0.01),
            group_ids=torch.tensor(GROUPS),
            values=column(),
            new_values=column().requires_grad_(),
        )
        returns = column()
        # Eighths, which verl's float32 holds exactly.
        parts = {name: torch.as_tensor(rng.integers(0, 9, n) / 8, dtype=dtype) for name in PARTS}
        return cls(view=replace(view, reward_parts=parts), advantages=credits, returns=returns)

    def weighted(self, reducer: Reducer, **options: Any) -> TokenView:
        """Return the view, its tokens weighed by a reducer."""
        weights = reducer(
            ReductionView(
                loss_mask=self.view.loss_mask.double().numpy(),
                response_lengths=self.view.offsets.diff().numpy(),
                rollout_ids=np.arange(len(self.view.rewards)),
            ),
            **options,
        )
        return TokenView(
            **(vars(self.view) | {"weights": torch.as_tensor(weights, dtype=self.advantages.dtype)})
        )

    def rewarded(self, transform: Any, **options: Any) -> TokenView:
        """Return the view, its rewards and their parts transformed."""

        def transformed(rewards: Tensor) -> Tensor:
            found = transform(rewards.double().numpy(), self.view.group_ids.numpy(), **options)
            return torch.as_tensor(found, dtype=self.advantages.dtype)

        parts = {name: transformed(values) for name, values in self.view.reward_parts.items()}
        return replace(self.view, rewards=transformed(self.view.rewards), reward_parts=parts)

    def padded(self, column: Tensor) -> Tensor:
        """Return a column [T] as [N, longest], 0 behind each sample's end; differentiable."""
        lengths = self.view.offsets.diff()
        within = torch.arange(len(column)) - self.view.offsets[:-1][self.view.sample_of_token]
        zeros = torch.zeros(len(lengths), int(lengths.max()), dtype=column.dtype)
        return zeros.index_put((self.view.sample_of_token, within), column)

    def flat(self, padded: Tensor) -> Tensor:
        """Undo `padded`."""
        within = torch.arange(len(self.advantages)) - self.view.offsets[:-1][self.view.sample_of_token]
        column: Tensor = padded.expand(len(self.view.rewards), -1)[self.view.sample_of_token, within]
        return column

    def trained(self, column: Tensor) -> Tensor:
        """Return a column [T], 0 where the mask is."""
        mask: Tensor = self.view.loss_mask
        return column * mask

    @property
    def mask(self) -> Tensor:
        """[N, longest] the loss mask."""
        return self.padded(self.view.loss_mask)

    @property
    def token_rewards(self) -> Tensor:
        """[N, longest] each sample's reward at its last trained token."""
        mask = self.mask
        last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask > 0)
        rewards: Tensor = self.view.rewards
        return last.to(mask.dtype) * rewards[:, None]

    def with_gradient(self, loss: Tensor, *, of: str = "log_probs") -> Tensor:
        """Return a loss and its gradient with respect to a column, as one vector [1 + T]."""
        (gradient,) = torch.autograd.grad(loss, getattr(self.view, of))
        return torch.cat([loss.detach().reshape(1), gradient])
