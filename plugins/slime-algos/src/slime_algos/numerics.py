"""Conventions of the field, by framework: what `--numerics NAME` sets where neither recipe nor flag says otherwise.

They set how a quantity is computed, and turn nothing on: `--numerics trl --use-tis` is TRL's importance sampling. `kl_loss_type`
is that of the loss: verl and TRL have k1 in the reward, which is to be given beside `kl_coef`.
`slime bench conformance` holds each beside its framework's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Conventions = Mapping[str, Mapping[str, Any]]
"""Section -> setting -> value."""

SLIME: Conventions = {
    "algorithm": {
        "std_ddof": 1,
        "std_eps": 1e-6,
        "std_over_batch": False,
        "leave_one_out": False,
        "loss_reducer": "sample-mean",
    },
    "algos": {
        "eps_clip": 0.2,
        "eps_clip_c": None,
        "kl_loss_type": "k1",
        "value_clip": 0.2,
        "value_loss_scale": 1.0,
        "value_clipfrac": "moved",
        "tis_level": "token",
        "tis_mode": "clip",
        "tis_clip_low": 0.0,
        "tis_clip": 2.0,
        "tis_metric": "ratio",
        "rs_count_rejected": True,
        "skip_masked": False,
    },
}
"""The reference system's, which are our defaults."""

VERL: Conventions = {
    "algorithm": {**SLIME["algorithm"], "loss_reducer": "token-mean"},
    "algos": {
        **SLIME["algos"],
        "eps_clip_c": 3.0,
        "kl_loss_type": "low_var_kl",
        "value_clip": 0.5,
        "value_loss_scale": 0.5,
        "value_clipfrac": "larger",
        "tis_metric": "weight",
        "rs_count_rejected": False,
        "skip_masked": True,
    },
}
"""verl 0.9.1's. Its GAE whitens always: add `--normalize-advantages`. It gives a group of one the bare reward."""

TRL: Conventions = {
    "algorithm": {**SLIME["algorithm"], "std_eps": 1e-4, "loss_reducer": "token-mean"},
    "algos": {
        **SLIME["algos"],
        "kl_loss_type": "k3",
        "tis_level": "sequence",
        "tis_mode": "mask",
        "tis_clip": 3.0,
        "tis_metric": "weight",
        "skip_masked": True,
    },
}
"""TRL 1.16's `GRPOTrainer` (loss_type dapo)."""

OPENRLHF: Conventions = {
    "algorithm": {**SLIME["algorithm"], "std_eps": 1e-9, "loss_reducer": "token-mean"},
    "algos": {
        **SLIME["algos"],
        "value_clip": 0.5,
        "value_loss_scale": 0.5,
        "tis_mode": "mask",
        "tis_clip_low": 0.5,
        "tis_clip": 5.0,
        "skip_masked": True,
    },
}
"""OpenRLHF 0.11.2's. It holds every KL estimate within ±10, which only our `low_var_kl` does."""
