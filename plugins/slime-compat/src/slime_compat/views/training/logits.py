"""Logits of a loss of the reference system, or `Logits`, which stands for them, and what is computed of either there.

Imports torch, when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from slime_core.errors import PluginError


class Logits:
    """Log-probs and entropies of a loss's tokens, in the place of the logits that they are of.

    Args:
        log_probs: float32 [T].
        entropy: float32 [T]; None where the loss has no entropy term.
        lengths: tokens of each sample.
    """

    def __init__(self, log_probs: Any, entropy: Any, lengths: Sequence[int]) -> None:
        self._log_probs, self._entropy, self._lengths = log_probs, entropy, list(lengths)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be a tensor.

        Raises:
            PluginError: always.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise PluginError(
            f"a custom loss asks for logits.{name}, and its source does not say so; name its parameter in the function itself, "
            "from which slime reads whether it computes with logits"
        )

    def split(self, *, with_entropy: bool) -> dict[str, list[Any]]:
        """Return `log_probs`, and with it `entropy`: lists of tensors, one a sample."""
        told = {"log_probs": list(self._log_probs.split(self._lengths))}
        if with_entropy:
            if self._entropy is None:
                raise PluginError(
                    "a custom loss asks for entropies, and its file does not; wanted with_entropy=True in the file of the loss"
                )
            told["entropy"] = list(self._entropy.split(self._lengths))
        return told


def get_log_probs_and_entropy(
    logits: Any, *, with_entropy: bool = False, non_loss_data: bool = True, **batch: Any
) -> tuple[Any, dict[str, list[Any]]]:
    """Return (an empty loss, log-probs and entropies of response tokens: lists of tensors, one a sample).

    Args:
        logits: what a custom loss was given, or what it made of them, of the same shape.
        with_entropy: whether entropies are wanted.
        non_loss_data: nothing: entropies have a gradient.
        batch: of logits themselves, as for `get_responses`.

    Raises:
        PluginError: there are no entropies.
    """
    import torch

    if isinstance(logits, Logits):
        return torch.empty(0), logits.split(with_entropy=with_entropy)
    told: dict[str, list[Any]] = {"log_probs": []} | ({"entropy": []} if with_entropy else {})
    for chunk, tokens in get_responses(logits, **batch):
        log_probs, entropy = calculate_log_probs_and_entropy(chunk, tokens, None, with_entropy=with_entropy)
        told["log_probs"].append(log_probs.squeeze(-1))
        if with_entropy:
            told["entropy"].append(entropy)
    return logits.new_empty(0), told


def get_responses(
    logits: Any,
    *,
    args: Any,
    unconcat_tokens: Sequence[Any],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **_: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield for each sample its response's (logits divided by the temperature [R, vocabulary], ids [R]).

    Args:
        logits: float32 [1, T, vocabulary] of all tokens of all samples, as a custom loss is given them.
        args: of the run.
        unconcat_tokens: int64 ids of each sample.
        total_lengths: tokens of each sample, its prompt's included.
        response_lengths: of each sample.

    Raises:
        PluginError: `logits` only stand for logits.
    """
    if isinstance(logits, Logits):
        raise PluginError(
            "get_responses: found what stands for logits; call it in the custom loss itself, from whose source slime reads whether "
            "it computes with logits"
        )
    ends = 0
    columns = zip(unconcat_tokens, total_lengths, response_lengths, strict=True)
    for tokens, total, response in columns:
        ends += total
        yield logits[0, ends - response - 1 : ends - 1] / args.rollout_temperature, tokens[total - response :]


def calculate_log_probs_and_entropy(
    logits: Any, tokens: Any, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[Any, Any]:
    """Return (log-probs of tokens [R, 1], entropies in nats [R] or None).

    Args:
        logits: [R, vocabulary]: every rank has the whole vocabulary.
        tokens: int64 [R].
        tp_group: nothing, by that.
        with_entropy: whether entropies are wanted.
        chunk_size: nothing: all at once.
    """
    whole = logits.float().log_softmax(-1)
    entropy = -(whole.exp() * whole).sum(-1) if with_entropy else None
    return whole.gather(-1, tokens[:, None]), entropy


def compute_log_probs(logits: Any, tokens: Any, process_group: Any) -> Any:
    """Return the log-probs of tokens [R, 1]; see `calculate_log_probs_and_entropy`."""
    return calculate_log_probs_and_entropy(logits, tokens, process_group)[0]


def compute_entropy_from_logits(logits: Any, process_group: Any) -> Any:
    """Return the entropy of each row of logits, nats [R]: every rank has the whole vocabulary."""
    whole = logits.float().log_softmax(-1)
    return -(whole.exp() * whole).sum(-1)
