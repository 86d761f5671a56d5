"""The protocols of reducers, advantage estimators and losses, and the token views that they get.

Core never imports torch, so tensors appear here as `Any`; each docstring gives their shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class ReductionView:
    """What a reducer sees: the masks of one optimizer step, on the host."""

    loss_mask: NDArray[np.float64]
    """[T] 1.0 where a token is trained on."""
    response_lengths: NDArray[np.int64]
    """[N] tokens of each sample, which follow one another."""
    rollout_ids: NDArray[np.int64]
    """[N] execution of each sample."""
    total_lengths: NDArray[np.int64] | None = None
    """[N] tokens of each sample, its prompt's included; None where nobody says."""

    @functools.cached_property
    def sample_of_token(self) -> NDArray[np.int64]:
        """[T] position in the step of the sample that a token belongs to; made for the first who asks."""
        import numpy as np  # which no command needs to be told what protocols there are

        return np.repeat(np.arange(len(self.response_lengths)), self.response_lengths)


#: (view, *, options) -> weights_T float64 such that the step's loss is sum(weights_T * loss_T).
Reducer = Callable[..., "NDArray[np.float64]"]


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """What an estimator or a loss sees: response tokens of some samples, flat, as torch tensors on one device.

    Log-probs are natural, float32, and taken at the rollout temperature.
    """

    offsets: Any
    """int64 [N + 1]: sample i owns the tokens offsets[i]:offsets[i + 1]."""
    sample_of_token: Any
    """int64 [T]: the sample that each token belongs to."""
    loss_mask: Any
    """float32 [T]: 1 where a token is trained on."""
    weights: Any
    """float32 [T]: share of each token in the loss of its whole optimizer step (see `Reducer`)."""
    rewards: Any
    """float32 [N]: transformed rewards."""
    old_log_probs: Any
    """float32 [T]: log-probs of the policy that the step started from, without gradient."""
    log_probs: Any = None
    """float32 [T]: log-probs under the weights being trained, with gradient. None for an estimator."""
    entropy: Any = None
    """float32 [T]: entropy (nats) of each token's distribution; only where the loss asked for it."""
    rollout_log_probs: Any = None
    """float32 [T]: the engine's log-probs."""
    ref_log_probs: Any = None
    """float32 [T]: log-probs of the reference model."""
    teacher_log_probs: Any = None
    """float32 [T]: log-probs of the teacher."""
    group_ids: Any = None
    """int64 [N]: prompt group of each sample. For estimators."""
    reward_parts: Any = None
    """Name -> float32 [N]: transformed parts of the rewards, those that the estimator names. For estimators."""
    train_metadata: Any = None
    """Sequence [N] of `Sample.train_metadata`, None where a sample has none; None where none has any."""
    sum_pi_squared: Any = None
    """float32 [T]: sum over the vocabulary of each token's squared probabilities under the old policy. For estimators."""
    values: Any = None
    """float32 [T]: the critic's values when the step began, without gradient."""
    new_values: Any = None
    """float32 [T]: the critic's values under the weights being trained, with gradient. Only for a critic's loss."""
    staleness: Any = None
    """int64 [T]: steps between the weights that generated each token and those that the step trains; see
    `TrainBatch.staleness`."""
    total_lengths: Any = None
    """int64 [N]: tokens of each sample, its prompt's included."""
    logits: Any = None
    """float32 [T, vocabulary]: logits of each token's distribution divided by the rollout temperature, with gradient; also where
    top-p or top-k left fewer ids to draw from. Log-softmax at a token is its log-prob without either. Only for losses."""
    tokens: Any = None
    """int64 [T]: ids; there where `logits` are."""
    sequence_logits: Any = None
    """float32 [S, vocabulary]: logits behind each of the `sequence_tokens` as the model gives them, with gradient. Zeros behind
    the last token of a sample, which predicts nothing and which the model does not read. Only for losses."""
    sequence_tokens: Any = None
    """int64 [S]: ids of the samples, prompts and responses, one after another; there where `sequence_logits` are."""
    importance: Any = None
    """float32 [T]: what each token's policy loss is multiplied by, see `correction.Correction`; None for 1."""

    def reduce(self, values: Any) -> Any:
        """Return the scalar share of `values` [T] in the whole optimizer step: sum(weights * values).

        Shares of micro-batches and ranks add up to the step's value, however it is cut.
        """
        return (self.weights * values).sum()


#: (options) -> the optional fields of `TokenView` that must be filled under these options.
Needs = Callable[[Mapping[str, Any]], frozenset[str]]


def needs_of(function: Callable[..., Any], options: Mapping[str, Any]) -> frozenset[str]:
    """Return the optional `TokenView` fields that an estimator or a loss wants under `options`.

    Asks the function's attribute `needs` (see `Needs`); a function without one wants none. `log_probs` always
    goes to a loss and need not be named. A field that neither of them needs may be None, which saves its cost.
    """
    needs: Needs | None = getattr(function, "needs", None)
    return frozenset() if needs is None else needs(options)


class AdvantageEstimator(Protocol):
    """Credits tokens. The attribute `reward_transform` names the reward transform it wants.

    Optional attributes: `needs`, the optional fields of the view that it reads (see `needs_of`); `reward_parts`,
    (options) -> the parts of rewards that it reads; `loss`, the loss that goes with it, `policy_loss` otherwise;
    `gives_importance`, (options) -> whether its `Correction` has importance weights.
    """

    reward_transform: str

    def __call__(self, view: TokenView, **options: Any) -> tuple[Any, ...]:
        """Return (advantages [T], returns [T]), float32, without gradient; metrics, name -> scalar, may follow.

        An estimator that remembers something from batch to batch takes the keyword `state`, an empty mapping at
        first, and returns the next state, of JSON values, after the metrics. The trainer saves it with its own.
        After the state a `correction.Correction` may follow.
        """


class LossFn(Protocol):
    """The loss of some response tokens.

    An optional attribute `needs` says which optional fields of the view it reads (see `needs_of`): entropy
    only with an entropy term, reference log-probs only with a KL term. A critic's loss gets the estimator's
    returns in the place of advantages. A policy's loss that multiplies each token's loss by `view.importance`, where
    that is given, has the attribute `weighs_importance` set to True; others are refused together with importance weights.
    """

    def __call__(self, view: TokenView, advantages: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return (scalar loss with gradient, metrics: name -> detached scalar), both reduced by `view.reduce`."""
