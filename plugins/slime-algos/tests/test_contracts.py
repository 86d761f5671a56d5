"""Our own estimators, losses and the rest keep the promises of their kinds, and the kits tell what breaks one."""

from __future__ import annotations

import pytest
import torch
from slime_algos.reducers import constant
from slime_algos.testing import check_advantage, check_loss
from slime_core.errors import ContractError
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts

KITS = {
    "slime.advantages": check_advantage,
    "slime.losses": check_loss,
    "slime.generators": contracts.check_generator,
}
ARGUMENTS = {
    "gdpo": {"options": {"gdpo_weights": {"part": 1.0}}},
    "kl_cov_loss": {"adds_up": False},  # the tokens of a micro-batch that covary most
    "clip_cov_loss": {"adds_up": False},
}


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-algos"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    registry = Registry()
    contracts.check_plugin(registry, plugin)
    if plugin.group in KITS:
        KITS[plugin.group](registry.load(plugin), **ARGUMENTS.get(plugin.name, {}))


def test_a_reducer_with_an_option_keeps_its_promises():
    contracts.check_reducer(constant, options={"loss_scale_factor": 8.0})


def estimator(credits, transform="raw", needs=frozenset()):
    def estimate(view):
        return credits(view)

    estimate.reward_transform, estimate.needs = transform, lambda options: needs
    return estimate


def spread(view):
    return view.rewards[view.sample_of_token]


@pytest.mark.parametrize(
    ("credits", "said"),
    [
        (lambda view: spread(view), "found Tensor; wanted a tuple (advantages, returns[, metrics])"),
        (lambda view: (view.rewards, view.rewards), "advantages: found shape (8,); wanted a tensor [T]"),
        (lambda view: (view.old_log_probs, spread(view)), "advantages: found nan at token"),
        (lambda view: (spread(view), spread(view) * view.old_log_probs.nansum()), "found credits that change with masked tokens"),
        (lambda view: (spread(view), spread(view).requires_grad_()), "returns: found a gradient; wanted none"),
        (lambda view: (spread(view), spread(view), {"a": float("inf")}), "a: found inf; wanted a finite number"),
    ],
)  # fmt: skip
def test_an_estimator_that_breaks_a_promise_is_told(credits, said):
    with pytest.raises(ContractError) as told:
        check_advantage(estimator(credits))
    assert said in str(told.value)


def test_what_an_estimator_declares_is_checked():
    with pytest.raises(ContractError, match="found reward_transform None; wanted the name"):
        check_advantage(estimator(lambda view: (spread(view), spread(view)), transform=None))
    with pytest.raises(ContractError, match=r"needs: found .'nothing'.; wanted fields of TokenView"):
        check_advantage(estimator(lambda view: (spread(view), spread(view)), needs={"nothing"}))


def masked(view, values):
    return torch.where(view.loss_mask > 0, values, 0.0)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda view, a: view.reduce(masked(view, view.log_probs * a)), "found Tensor; wanted a pair (loss, metrics)"),
        (lambda view, a: (masked(view, view.log_probs * a), {}), "found a loss of ("),
        (lambda view, a: (view.reduce(view.log_probs * a), {}), "found the loss nan; wanted a finite number"),
        (lambda view, a: (masked(view, view.log_probs * masked(view, a)).mean(), {}), "from micro-batches and"),
        (lambda view, a: (view.reduce(masked(view, a)), {}), "found a loss without gradient"),
        (lambda view, a: (view.reduce(masked(view, view.log_probs)), {"m": view.log_probs[0]}), "m: found a gradient or several"),
        (lambda view, a: (view.reduce(masked(view, (view.log_probs - view.log_probs.detach()).abs().sqrt())), {}), "the gradient by log_probs: found"),
    ],
)  # fmt: skip
def test_a_loss_that_breaks_a_promise_is_told(loss, said):
    with pytest.raises(ContractError) as told:
        check_loss(loss)
    assert said in str(told.value)
