"""A user's functions inside the trainer, with the reference system's signatures."""

import json

import torch
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

SEEN = []


def dr_grpo_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Sum each sample's tokens and divide by a constant."""
    divisor = 10.0

    def reduce(x):
        parts = x.split(response_lengths, dim=0)
        return sum((part * mask).sum() / divisor for part, mask in zip(parts, loss_masks, strict=True))

    return reduce


def mis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Truncate ratios, and reject sequences whose geometric mean is far off."""
    ratios, masks = [], []
    for train, rollout, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        log_ratio = (train - rollout) * mask
        ratios.append(torch.exp(log_ratio).clamp(max=2.0))
        inside = torch.exp(log_ratio.sum() / mask.sum().clamp(min=1)) < 1.5
        masks.append(mask * inside)
    weights = torch.cat(ratios)
    return pg_loss * weights, masks, {"mis_ratio": weights}


def adds(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Do something else than to multiply."""
    return pg_loss + 1.0, loss_masks, {}


def advantages(args, rollout_data):
    """Give each token its sample's reward."""
    columns = zip(rollout_data["rewards"], rollout_data["log_probs"], strict=True)
    rollout_data["advantages"] = [torch.full_like(log_probs, reward) for reward, log_probs in columns]
    rollout_data["returns"] = rollout_data["advantages"]


def reinforce(args, batch, logits, sum_of_sample_mean):
    """Minimise -A log pi."""
    _, told = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=False,
    )
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * torch.cat(told["log_probs"]))
    return loss, {"own_loss": loss.clone().detach()}


def init(args):
    """Note the rank."""
    SEEN.append(("init", args.rank, args.world_size, args.lr))


def before_log_prob(args, model, store_prefix):
    """Note whose log-probs are taken."""
    SEEN.append(("log_prob", len(model), store_prefix))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    """Note the step."""
    SEEN.append(("train_step", rollout_id, step_id, hasattr(optimizer, "step")))


def postprocess(args, rollout_id, rollout_data):
    """Leave the first token of each response out."""
    for mask in rollout_data["loss_masks"]:
        mask[0] = 0
    SEEN.append(("postprocess", rollout_id, len(rollout_data["advantages"])))


def post_write(args, version_dir, rollout_engines):
    """Look at the files of an update."""
    import os

    SEEN.append(
        (
            "post_write",
            sorted(name for name in os.listdir(version_dir) if name.endswith(".json")),
            rollout_engines,
        )
    )
    with open(f"{args.output_dir}/published.jsonl", "a") as file:
        file.write(json.dumps(sorted(os.listdir(version_dir))) + "\n")
