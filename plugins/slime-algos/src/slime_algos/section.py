"""Settings of estimators, losses and reducers. Names and defaults are the reference system's flags where it has them."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan
from slime_core.config.base import Amount, Decay, Index, Positive, SectionModel, Share, Weight

Level = Literal["token", "sequence", "geometric"]


class AlgosSection(SectionModel):
    """Options of estimators, losses and reducers; each takes those whose names are its own keyword parameters."""

    eps_clip: Annotated[float, Ge(0), Le(1)] = 0.2
    """How far below 1 the ratio of new to old probability may fall before it is clipped; above 1 as well,
    unless `eps_clip_high` is given."""
    eps_clip_high: Amount | None = None
    """How far above 1 the ratio may rise before it is clipped; `eps_clip` when not given."""
    eps_clip_c: Annotated[float, Gt(1), Le(1e9)] | None = None
    """Dual clip: a token of negative advantage A loses at most -A times this; no limit when not given."""
    value_clip: Amount | None = 0.2
    """How far a value may move from the critic's old one before its loss is clipped; None does not clip."""
    value_loss_scale: Positive = 1.0
    """Weight of the squared error of values; 0.5 in PPO, verl and OpenRLHF."""
    value_clipfrac: Literal["moved", "larger"] = "moved"
    """Which tokens the metric `value_clipfrac` counts: those whose value moved by more than `value_clip`, or those whose
    clipped loss is the larger."""
    gamma: Share = 1.0
    """Discount of a token's reward beside that of the token before it."""
    lambd: Annotated[float, Ge(0), Le(1)] = 1.0
    """Weight of longer estimates in generalised advantage estimation."""
    turn_discount: Share = 1.0
    """Discount of a turn beside the one after it, for the estimator `multi_turn`."""
    kl_coef: Amount = 0.0
    """Weight of the KL divergence from the reference model in the reward, estimated by `kl_loss_type`."""
    kl_target: Positive | None = None
    """KL divergence from the reference model, nats a token, towards which `kl_coef` is steered; fixed when not given."""
    kl_horizon: Positive = 10_000.0
    """Samples over which a divergence 10% off `kl_target` changes `kl_coef` by 10%."""
    normalize_advantages: bool = False
    """Whiten advantages over the trained tokens of a rollout."""
    use_opd: bool = False
    """On-policy distillation: advantages less `opd_kl_coef` times log π - log π_teacher."""
    opd_kl_coef: Weight = 1.0
    """Weight of on-policy distillation."""
    use_tis: bool = False
    """Weigh tokens by the importance ratio of the trainer's old policy to the engine's."""
    tis_level: Level = "token"
    """Ratio of a token's importance weight: its own, or its sample's product or geometric mean."""
    tis_mode: Literal["clip", "mask"] = "clip"
    """What happens to a ratio out of bounds: held at the bound (TIS), or 0 (IcePop)."""
    tis_clip_low: Amount = 0.0
    """Lower bound of the importance ratio."""
    tis_clip: Annotated[float, Gt(0), AllowInfNan(True)] = 2.0
    """Upper bound of the importance ratio; inf for none."""
    tis_batch_normalize: bool = False
    """Divide importance weights by their mean over the trained tokens of a rollout."""
    tis_metric: Literal["ratio", "weight"] = "ratio"
    """What the metric `tis` is the mean of: the ratio as it was, or the importance weight that it became."""
    use_rs: bool = False
    """Reject tokens and samples on which the trainer's old policy and the engine's disagree."""
    rs_level: Level = "token"
    """Ratio that decides on rejection: a token's own, or its sample's product or geometric mean."""
    rs_lower_bound: Amount = 0.5
    """Smallest ratio that is kept."""
    rs_upper_bound: Positive = 2.0
    """Largest ratio that is kept."""
    rs_veto_threshold: Decay = 0.0
    """A sample with a token of a smaller ratio is rejected whole; 0 for none."""
    rs_count_rejected: bool = True
    """Count rejected tokens, which have no loss of any kind, in what the reducer divides by, and in whitening."""
    max_token_staleness: Index | None = None
    """Reject tokens whose weights were older than those that the step trains by more steps than this; any age is kept when
    not given."""
    staleness_metrics: bool = False
    """Report importance ratios, clipped and rejected shares also for stale tokens apart (`NAME_stale`)."""
    use_opsm: bool = False
    """Off-policy sequence masking: no loss from samples of negative advantage that the policy has moved away from."""
    opsm_delta: Amount = 1e-4
    """Mean of log π_old - log π over a sample, nats, beyond which it is masked."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Compute the KL divergence from the reference model, and report it."""
    kl_loss_coef: Amount = 0.0
    """Weight of the KL divergence in the loss; 0 only reports it. Needs `use_kl_loss`."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """Estimator of the KL divergence. As a loss, `k1` has no gradient on average where samples are the policy's own: `k2`, `k3` and `low_var_kl`
    pull to the reference."""
    use_unbiased_kl: bool = False
    """Weigh the KL divergence in the loss by the ratio of new to old probability."""
    kl_straight_through: bool = False
    """Take the gradient of `k2` for the KL divergence in the loss, whatever the estimator."""
    sapo_tau_pos: Positive = 1.0
    """How fast SAPO's gate closes where the advantage is positive."""
    sapo_tau_neg: Positive = 1.05
    """How fast SAPO's gate closes elsewhere."""
    clip_cov_ratio: Share = 2e-4
    """Most tokens that Clip-Cov holds back, as a share of the trained ones; at least one."""
    clip_cov_low: Weight = 1.0
    """Smallest covariance that Clip-Cov holds back."""
    clip_cov_high: Weight = 5.0
    """Largest covariance that Clip-Cov holds back."""
    kl_cov_ratio: Share = 2e-4
    """Tokens that KL-Cov holds back, as a share of the trained ones; at least one."""
    kl_cov_coef: Amount = 1.0
    """Weight of KL-Cov's penalty."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """DPPO's measure of how far a token's probability has moved."""
    dppo_ratio_limit: Positive = 20.0
    """Largest ratio by which DPPO weighs a token."""
    dro_beta: Positive = 0.1
    """Weight of DRO's squared log-ratio."""
    passk_std_normalization: bool = False
    """Divide pass@k credit by the group's standard deviation."""
    passk_std_eps: Amount = 1e-6
    """Added to that standard deviation."""
    gdpo_weights: dict[str, Weight] = {}
    """Parts of the reward, by name, that the estimator `gdpo` normalises each by itself, and their weights."""
    skip_masked: bool = False
    """Leave fully masked samples out of what the reducer divides by."""
