"""`Logits`: what stands for logits in a loss of the reference system, and what is computed of them there."""

from __future__ import annotations

from collections.abc import Sequence
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
            f"a custom loss asks for logits.{name}: here a loss is given log-probs, not logits; take them by "
            "slime.backends.megatron_utils.loss.get_log_probs_and_entropy(logits, ...)"
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
    logits: Logits, *, with_entropy: bool = False, non_loss_data: bool = True, **_: Any
) -> tuple[Any, dict[str, list[Any]]]:
    """Return (an empty loss, log-probs and entropies of response tokens: lists of tensors, one a sample).

    Raises:
        PluginError: `logits` is not what a loss was given, or there are no entropies.
    """
    if not isinstance(logits, Logits):
        raise PluginError(
            f"get_log_probs_and_entropy: found {type(logits).__name__}; wanted the logits of a custom loss"
        )
    return None, logits.split(with_entropy=with_entropy)
