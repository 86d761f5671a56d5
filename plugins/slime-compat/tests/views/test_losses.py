"""The default losses, and their terms, as functions that a user's own loss calls."""

from __future__ import annotations

import types

import pytest
import torch
from slime_compat.adapters.training import ReferenceLoss
from slime_compat.views.training.formulae import compute_approx_kl
from slime_compat.views.training.logits import Logits
from slime_compat.views.training.policy import policy_loss_function
from slime_core.config.functions import run_args
from slime_core.config.load import load_settings
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry

SETTINGS = {
    "eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None, "use_kl_loss": False, "entropy_coef": 0.0,
}  # fmt: skip
#: A file with a loss that adds to the default one.
LOSS = """
from slime.backends.megatron_utils.loss import policy_loss_function

def loss(args, batch, logits, sum_of_sample_mean):
    return policy_loss_function(args, batch, logits, sum_of_sample_mean)
"""


def loss_of(**settings):
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    batch = {
        "log_probs": [torch.tensor([-1.0, -2.0, -0.5])],
        "advantages": [torch.tensor([1.0, 2.0, 3.0])],
    }
    logits = Logits(log_probs, torch.tensor([0.5, 1.0, 1.5]), [3])
    args = types.SimpleNamespace(**SETTINGS | settings)
    return policy_loss_function(args, batch, logits, torch.mean)


def test_entropy_lowers_the_loss_by_its_weight():
    """On-policy: minus the mean advantage of 2, and half of the mean entropy of 1."""
    loss, metrics = loss_of()
    assert loss.item() == pytest.approx(-2.0) and "entropy_loss" not in metrics
    loss, metrics = loss_of(entropy_coef=0.5)
    assert loss.item() == pytest.approx(-2.5) and metrics["entropy_loss"].item() == 1.0


@pytest.fixture
def adapted(tmp_path, monkeypatch):
    """Return a function that returns the adapter of LOSS in a run with these flags."""
    (tmp_path / "their_loss.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    needed = ["--hf-checkpoint", "m", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]

    def adapted(*flags):
        settings = load_settings([], [*needed, *flags], registry=Registry.from_environment())
        return ReferenceLoss(path="their_loss:loss", run_args=run_args(settings))

    return adapted


def test_entropies_are_asked_for_where_they_have_a_weight(adapted):
    assert "entropy" not in adapted().needs({})
    assert "entropy" in adapted("--entropy-coef", "0.5").needs({})


@pytest.mark.parametrize(
    "flags",
    [
        ("--advantage-estimator", "gspo"),
        ("--advantage-estimator", "cispo"),
        ("--use-opsm",),
        ("--use-unbiased-kl",),
    ],
)
def test_settings_that_the_default_loss_lacks_are_refused_before_the_run(adapted, flags):
    wanted = f"calls policy_loss_function, which has no {' '.join(flags)} here; wanted a"
    with pytest.raises(PluginError, match=wanted):
        adapted(*flags)


def test_a_weighed_divergence_is_cut_off_once_it_is_weighed():
    """k3 of a difference of 3.5 is e^3.5 - 4.5 = 28.615, of 2.5 e^2.5 - 3.5 = 8.682."""
    new, base = torch.zeros(2), torch.tensor([3.5, 2.5])
    weighed = compute_approx_kl(new, base, "low_var_kl", torch.tensor([0.1, 3.0]))
    assert weighed.tolist() == pytest.approx([2.8615, 10.0], abs=1e-3)
    assert compute_approx_kl(new, base, "low_var_kl").tolist() == pytest.approx([10.0, 8.682], abs=1e-3)
