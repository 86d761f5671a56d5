"""Formulae of losses."""

from slime_compat.views.formulae import compute_approx_kl, compute_policy_loss

__all__ = ["compute_approx_kl", "compute_policy_loss"]
