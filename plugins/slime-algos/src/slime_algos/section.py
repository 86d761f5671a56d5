"""Settings of the losses. Names and defaults are the reference system's flags."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from slime_core.config.base import SectionModel


class AlgosSection(SectionModel):
    """Options of losses and estimators; each takes those whose names are its own keyword parameters."""

    eps_clip: Annotated[float, Ge(0), Lt(1)] = 0.2
    """How far below 1 the ratio of new to old probability may fall before it is clipped; above 1 as well,
    unless `eps_clip_high` is given."""
    eps_clip_high: Annotated[float, Ge(0)] | None = None
    """How far above 1 the ratio may rise before it is clipped; `eps_clip` when not given."""
    eps_clip_c: Annotated[float, Gt(1)] | None = None
    """Dual clip: a token of negative advantage A loses at most -A times this; no limit when not given."""
    value_clip: Annotated[float, Ge(0)] | None = 0.2
    """How far a value may move from the critic's old one before its loss is clipped; None does not clip."""
    value_loss_scale: Annotated[float, Gt(0)] = 1.0
    """Weight of the squared error of values; 0.5 in PPO, verl and OpenRLHF."""
    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """Discount of a token's reward beside that of the token before it."""
    lambd: Annotated[float, Ge(0), Le(1)] = 1.0
    """Weight of longer estimates in generalised advantage estimation."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the reference model in the reward, estimated by `kl_loss_type`."""
    normalize_advantages: bool = False
    """Whiten advantages over the trained tokens of a rollout."""
    use_opd: bool = False
    """On-policy distillation: advantages less `opd_kl_coef` times log π − log π_teacher."""
    opd_kl_coef: float = 1.0
    """Weight of on-policy distillation."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Compute the KL divergence from the reference model, and report it."""
    kl_loss_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence in the loss; 0 only reports it. Needs `use_kl_loss`."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence."""
