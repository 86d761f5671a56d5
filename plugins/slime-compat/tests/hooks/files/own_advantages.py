"""A user's advantage functions, with the reference system's signature."""

import torch


def of_rewards(args, rollout_data):
    """Give each token its sample's reward, as the reference system's GRPO does."""
    columns = zip(rollout_data["rewards"], rollout_data["log_probs"], strict=True)
    rollout_data["advantages"] = [torch.full_like(log_probs, reward) for reward, log_probs in columns]
    rollout_data["returns"] = rollout_data["advantages"]


def less_divergence(args, rollout_data):
    """Take the divergence off each token's reward."""
    columns = zip(rollout_data["rewards"], rollout_data["kl"], strict=True)
    rollout_data["advantages"] = [reward - args.kl_coef * kl for reward, kl in columns]
    rollout_data["returns"] = rollout_data["kl"]


def less_values(args, rollout_data):
    """Take the critic's values off each token's reward."""
    columns = zip(rollout_data["rewards"], rollout_data["values"], strict=True)
    rollout_data["returns"] = [torch.full_like(values, reward) for reward, values in columns]
    both = zip(rollout_data["returns"], rollout_data["values"], strict=True)
    rollout_data["advantages"] = [returns - values for returns, values in both]


def of_log_probs(args, rollout_data):
    """Give each token its log-prob, masked or not."""
    rollout_data["advantages"] = rollout_data["returns"] = list(rollout_data["log_probs"])


def of_tokens(args, rollout_data):
    """Ask for what is not there."""
    rollout_data["advantages"] = [tokens * 0.0 for tokens in rollout_data["tokens"]]


def doubled(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Weigh each token by 2."""
    return pg_loss * 2.0, loss_masks, {}
