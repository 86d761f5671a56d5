"""Weights and rejection of tokens by how far trainer and engine differ, configured by a YAML file."""

from typing import Any

import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp


def compute_weights(args, *, train_log_probs, rollout_log_probs, loss_masks):
    weights, masks, metrics = [], [], {}
    for train, rollout, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        log_ratio = train - rollout
        if args.mis_level == "geometric":
            log_ratio = ((log_ratio * mask).sum() / torch.clamp_min(mask.sum(), 1)).expand_as(mask)
        weight = torch.exp(torch.clamp(log_ratio, -20.0, 20.0))
        inside = (weight >= args.mis_lower_bound) & (weight <= args.mis_upper_bound)
        weights.append((weight * mask).detach())
        masks.append((mask * inside.float()).detach())
        metrics.setdefault("mean_is_weight_before_clip", []).append(weight.detach())
        metrics.setdefault("mask_fraction", []).append((~inside).int())
    return weights, masks, metrics


def compute_mis_weights_with_cp(
    args,
    *,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
    **kwargs: Any,
):
    lengths = list(zip(total_lengths, response_lengths, strict=True))

    def whole(columns):
        return [all_gather_with_cp(one, *both) for one, both in zip(columns, lengths, strict=True)]

    def own(columns):
        return [slice_log_prob_with_cp(one, *both) for one, both in zip(columns, lengths, strict=True)]

    weights, masks, metrics = compute_weights(
        args=args,
        train_log_probs=whole(train_log_probs),
        rollout_log_probs=whole(rollout_log_probs),
        loss_masks=loss_masks,
    )
    told = {f"mis_{name}": torch.cat(own(values), dim=0) for name, values in metrics.items()}
    return pg_loss * torch.cat(own(weights), dim=0), own(masks), told
