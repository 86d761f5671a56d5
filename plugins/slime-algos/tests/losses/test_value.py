"""The critic's loss: by hand, and its gradient."""

import pytest
import torch
from slime_algos.losses.value import value_loss
from slime_algos.testing import random_view, view_of
from slime_core.errors import TrainerError
from slime_core.protocols import TokenView, needs_of


@pytest.mark.parametrize(
    ("value", "old", "target", "options", "loss", "clipped"),
    [
        (1.1, 1.0, 2.0, {}, 0.81, 0.0),  # within the clip: (1.1 - 2)²
        (1.5, 1.0, 2.0, {}, 0.64, 1.0),  # clipped to 1.2, whose loss is the larger
        (0.5, 1.0, 2.0, {}, 2.25, 1.0),  # clipped to 0.8, whose loss is the smaller
        (0.5, 1.0, 2.0, {"value_clipfrac": "larger"}, 2.25, 0.0),
        (1.5, 1.0, 2.0, {"value_clipfrac": "larger"}, 0.64, 1.0),
        (1.5, 1.0, 2.0, {"value_clip": None}, 0.25, 0.0),
        (1.5, 1.0, 2.0, {"value_clip": 0.4}, 0.36, 1.0),
        (1.5, 1.0, 2.0, {"value_loss_scale": 0.5}, 0.32, 1.0),
    ],
)
def test_loss_of_one_token_by_hand(value, old, target, options, loss, clipped):
    view = view_of([[1.0]], values=[[old]], new_values=[[value]])
    found, metrics = value_loss(view, torch.tensor([target], dtype=torch.float64), **options)
    assert found.item() == pytest.approx(loss)
    assert metrics["value_loss"].item() == pytest.approx(loss)
    assert metrics["value_clipfrac"].item() == clipped


@pytest.mark.parametrize("clip", [0.3, None])
def test_gradient_equals_finite_differences(clip):
    view = random_view(4)
    returns = torch.randn(
        len(view.loss_mask), generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )

    def loss(new_values: torch.Tensor) -> torch.Tensor:
        moved = TokenView(**(vars(view) | {"new_values": new_values}))
        return value_loss(moved, returns, value_clip=clip)[0]

    assert torch.autograd.gradcheck(loss, view.new_values)


def test_masked_tokens_may_hold_anything():
    new_values = torch.tensor([1.0, torch.inf, torch.nan], dtype=torch.float64, requires_grad=True)
    view = view_of([[1, 0, 0]], values=[[1.0, torch.nan, 1.0]], new_values=new_values)
    loss, metrics = value_loss(view, torch.zeros(3, dtype=torch.float64))
    loss.backward()
    assert loss.item() == 1.0
    assert new_values.grad.tolist() == [2.0, 0.0, 0.0]
    assert not metrics["value_loss"].requires_grad


def test_needs_old_and_new_values():
    assert needs_of(value_loss, {}) == {"values", "new_values"}
    with pytest.raises(TrainerError, match="value_loss: TokenView has no new_values"):
        value_loss(view_of([[1.0]], values=[[0.0]]), torch.zeros(1))
