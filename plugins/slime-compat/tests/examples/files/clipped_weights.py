"""A loss of a user: importance weights clipped above, as constants, times log-probs."""

from argparse import Namespace
from collections.abc import Callable

import torch
from megatron.core import mpu
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, policy_loss_function
from slime.utils.ppo_utils import compute_approx_kl
from slime.utils.types import RolloutBatch


def loss_function(
    args: Namespace, batch: RolloutBatch, logits: torch.Tensor, sum_of_sample_mean: Callable
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if not mpu.is_pipeline_last_stage():
        nothing = 0 * logits.sum()
        return nothing, {"loss": nothing.clone().detach()}
    advantages = torch.cat(batch["advantages"], dim=0)
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    _, told = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        max_seq_lens=batch.get("max_seq_lens", None),
    )
    log_probs, old = torch.cat(told["log_probs"], dim=0), torch.cat(old, dim=0)
    ratio = torch.exp(log_probs - old)
    pg_loss = sum_of_sample_mean(-ratio.clamp(max=args.eps_clip_high).detach() * advantages * log_probs)
    entropy = sum_of_sample_mean(torch.cat(told["entropy"], dim=0))
    loss = pg_loss - args.entropy_coef * entropy
    kl = compute_approx_kl(log_probs, old, kl_loss_type=args.kl_loss_type)
    if log_probs.numel() == 0:
        loss += 0 * logits.sum()
    return loss, {
        "loss": loss.clone().detach(),
        "entropy_loss": entropy.clone().detach(),
        "own_kl": sum_of_sample_mean(kl).detach(),
        "is_ratio_mean": sum_of_sample_mean(ratio.detach()),
    }


def with_a_bonus(args, batch, logits, sum_of_sample_mean):
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    _, told = get_log_probs_and_entropy(logits, with_entropy=False)
    bonus = sum_of_sample_mean(torch.cat(told["log_probs"]))
    return loss - 0.1 * bonus, metrics | {"bonus": bonus.detach()}
