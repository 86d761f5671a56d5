"""A user's losses that compute with logits, with the reference system's signature."""

import torch
import torch.nn.functional as F
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_responses, policy_loss_function
from slime.utils.ppo_utils import compute_entropy_from_logits


def reinforce(args, batch, logits, sum_of_sample_mean):
    """Minimise -A log pi, with log pi from the packed logits by hand."""
    assert logits.dtype == torch.float32 and logits.shape[:2] == batch["tokens"].shape
    log_probs, end = [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        chosen = torch.log_softmax(logits[0, end - response - 1 : end - 1] / args.rollout_temperature, -1)
        log_probs.append(chosen.gather(-1, tokens[-response:].unsqueeze(-1)).squeeze(-1))
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * torch.cat(log_probs))
    return loss, {"own_loss": loss.clone().detach()}


def preferences(args, batch, logits, sum_of_sample_mean):
    """DPO's form: each sample against the next one; that whose response begins with the earlier letter is to become likelier."""
    _, told = get_log_probs_and_entropy(
        logits.float(),
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    columns = zip(told["log_probs"], batch["log_probs"], strict=True)
    gains = torch.stack([(new - old).sum() for new, old in columns])
    lengths = zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)
    begins = torch.stack([tokens[-length] for tokens, length in lengths])
    signs = -begins.diff().sign()
    loss = -F.logsigmoid(0.1 * signs * gains.diff()).mean()
    return loss, {"preference_loss": loss.detach()}


def distil(args, batch, logits, sum_of_sample_mean):
    """Forward KL from a teacher that wants the letter after the last one, and its logits are a table."""
    parts, entropies = [], []
    for (student, tokens), whole in zip(
        _responses(args, batch, logits), batch["unconcat_tokens"], strict=True
    ):
        before = whole[len(whole) - len(tokens) - 1 : -1]
        teacher = 4.0 * F.one_hot((before + 1) % student.size(-1), student.size(-1)).float()
        parts.append(
            F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(
                -1
            )
        )
        entropies.append(compute_entropy_from_logits(student, None))
    loss = sum_of_sample_mean(torch.cat(parts))
    return loss, {
        "forward_kl": loss.detach(),
        "student_entropy": sum_of_sample_mean(torch.cat(entropies)).detach(),
    }


def _responses(args, batch, logits):
    return get_responses(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )


def z_loss(args, batch, logits, sum_of_sample_mean):
    """The default loss, and the square of the log-normaliser of every response token."""
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    z = torch.cat([chunk.logsumexp(-1) for chunk, _ in _responses(args, batch, logits)])
    penalty = sum_of_sample_mean(z.square())
    return loss + 0.1 * penalty, {**metrics, "z": penalty.detach()}


def handed_on(args, batch, logits, sum_of_sample_mean):
    """Take log-probs in a function of its own: no logits are needed."""
    return _minus_log_probs(batch, logits, sum_of_sample_mean), {}


def _minus_log_probs(batch, given, reduce):
    _, told = get_log_probs_and_entropy(
        given, args=None, **{name: batch[name] for name in ("unconcat_tokens",)}
    )
    return reduce(-torch.cat(told["log_probs"]))


def of_shards(args, batch, logits, sum_of_sample_mean):
    """Add up what tensor-parallel ranks have."""
    peak = logits.max()
    torch.distributed.all_reduce(peak)
    return peak, {}
