"""Advantages, losses, corrections and reducers of the reference system: functions of tensors, in lists with an entry a sample.

Imports torch, when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError
from slime_core.protocols import ReductionView, TokenView
from slime_core.protocols.correction import Correction

from slime_compat.adapters.attributes import asks_for, calls, computes_with_logits
from slime_compat.adapters.calling import Theirs
from slime_compat.adapters.whole import whole_sequences
from slime_compat.views.training.logits import Logits
from slime_compat.views.training.policy import lacking_in_default_loss

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Column of a view -> its name in their data.
_COLUMNS = {
    "old_log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "values": "values",
}
#: Estimators whose rewards are compared within their group.
_GROUPED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_TOLERANCE = 1e-4
#: Functions that take each tensor-parallel rank to have some columns of logits.
_DEFAULT_LOSS = "policy_loss_function"
_OF_SHARDS = ("vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy", "all_reduce")


class ReferenceAdvantages:
    """Calls `fn(args, rollout_data)`, which sets `advantages` and `returns`.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.advantages", path, run_args)
        estimator = str((run_args or {}).get("advantage_estimator"))
        self.reward_transform = "group-norm" if estimator in _GROUPED else "raw"
        """As of the estimator that it takes the place of."""
        self._needs = _needed(run_args)

    def needs(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that the function finds."""
        return self._needs

    def __call__(self, view: TokenView) -> tuple[Any, Any]:
        """Return (advantages, returns), [T] each.

        Raises:
            PluginError: the function left one out, or of another shape.
        """
        data = _data(view)
        self._theirs.on_whole(self._theirs.args, data)
        lengths = data["response_lengths"]
        advantages = _joined(self._theirs, data, "advantages", lengths, view.loss_mask)
        if "returns" not in data:
            return advantages, advantages
        return advantages, _joined(self._theirs, data, "returns", lengths, view.loss_mask)


class ReferenceLoss:
    """Calls `fn(args, batch, logits, sum_of_sample_mean) -> (loss, dict)`.

    A function that computes with logits is given them: float32 [1, S, vocabulary] of all tokens of the samples, as they are before
    the temperature, with the whole vocabulary on every rank. One that only takes log-probs and entropies of them, by
    `get_log_probs_and_entropy` and the default losses, is given what stands for them (`Logits`), which takes no memory. Args as
    `ReferenceAdvantages`.

    Raises:
        PluginError: the function adds logits up over tensor-parallel ranks, or calls the default loss with settings that it lacks.
    """

    #: Its own affair: `rollout_log_probs` are in the batch.
    weighs_importance = False

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.losses", path, run_args)
        function = self._theirs.function
        self._wants_logits = computes_with_logits(function)
        ranks = int((run_args or {}).get("tensor_model_parallel_size") or 1)
        summed = [name for name in _OF_SHARDS if calls(function, name)]
        if self._wants_logits and ranks > 1 and summed:
            raise PluginError(
                f"{self._theirs.who}: its file calls {summed[0]}, with tensor_model_parallel_size {ranks}; wanted a loss of logits "
                "that every rank has whole: take log-probs by get_responses and log_softmax, or by get_log_probs_and_entropy"
            )
        calls_default = calls(function, _DEFAULT_LOSS)
        if calls_default and (lacking := lacking_in_default_loss(run_args or {})):
            raise PluginError(
                f"{self._theirs.who}: its file calls {_DEFAULT_LOSS}, which has no {lacking} here; wanted a loss that computes it itself, "
                "or the estimator's own loss, without --custom-loss-function-path"
            )
        has_entropy = asks_for(function, "with_entropy") or (
            calls_default and (run_args or {}).get("entropy_coef")
        )
        entropy = {"entropy"} if has_entropy else set()
        self._needs = _needed(run_args) | ({"sequence_logits"} if self._wants_logits else entropy)

    def needs(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that the function finds."""
        return self._needs

    def __call__(self, view: TokenView, advantages: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return (loss, metrics).

        Raises:
            PluginError: the function returned something else.
        """
        lengths = _lengths(view)
        batch = _data(view) | {"advantages": list(advantages.split(lengths))}
        logits: Any = Logits(view.log_probs, view.entropy, lengths)
        if self._wants_logits:
            logits, sequences = _sequences(view)
            batch |= sequences
        answer = self._theirs.on_whole(self._theirs.args, batch, logits, view.reduce)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise self._theirs.refuse(answer)
        loss, metrics = answer
        return loss, {"loss": loss.detach(), **{name: _detached(value) for name, value in metrics.items()}}


class ReferenceCorrection:
    """Calls `fn(args=, pg_loss=, train_log_probs=, rollout_log_probs=, loss_masks=, total_lengths=, response_lengths=)`.

    It returns (pg_loss, masks, metrics). What it multiplies each token's loss by is found with losses of 1; a function that does
    something else with them than to multiply is refused. Args as `ReferenceAdvantages`.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.corrections", path, run_args)
        self._is_checked = False

    def needs(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that the function finds."""
        return frozenset({"old_log_probs", "rollout_log_probs", "total_lengths"})

    def __call__(self, view: TokenView) -> tuple[Correction, Mapping[str, Any]]:
        """Return which tokens count and how much, and metrics.

        Raises:
            PluginError: the function returned something else, or does not multiply the loss.
        """
        import torch

        lengths = _lengths(view)
        ones = torch.ones_like(view.loss_mask)
        weights, masks, metrics = self._called(view, ones, lengths)
        if not self._is_checked:
            doubled, _, _ = self._called(view, 2.0 * ones, lengths)
            if not torch.allclose(doubled, 2.0 * weights, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise PluginError(
                    f"{self._theirs.who}: twice the loss did not come back as twice the result; wanted a function that multiplies "
                    "each token's loss by a weight: here weights are taken before the loss"
                )
            self._is_checked = True
        kept = torch.cat([mask.reshape(-1).to(view.loss_mask) for mask in masks]) > 0
        found = {name: _mean(value, view) for name, value in metrics.items()}
        correction = Correction(importance=weights, kept=kept | (view.loss_mask == 0))
        return correction, found

    def _called(
        self, view: TokenView, pg_loss: Any, lengths: Sequence[int]
    ) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
        answer = self._theirs.on_whole(
            args=self._theirs.args,
            pg_loss=pg_loss,
            train_log_probs=list(view.old_log_probs.split(lengths)),
            rollout_log_probs=list(view.rollout_log_probs.split(lengths)),
            loss_masks=list(view.loss_mask.split(lengths)),
            total_lengths=lengths if view.total_lengths is None else view.total_lengths.tolist(),
            response_lengths=list(lengths),
        )
        if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[2], Mapping):
            raise self._theirs.refuse(answer)
        weights, masks, metrics = answer
        if list(weights.shape) != list(pg_loss.shape) or [len(mask) for mask in masks] != list(lengths):
            raise PluginError(
                f"{self._theirs.who}: returned a loss of shape {list(weights.shape)} and masks of {[len(m) for m in masks][:9]}; "
                f"wanted {list(pg_loss.shape)} and {list(lengths)[:9]}"
            )
        return weights.detach(), masks, metrics


class ReferenceReducer:
    """Calls `fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reduce`.

    `reduce` of all tokens' losses [T] is a number, linear in them; what it multiplies each with is the token's weight, divided by
    the executions of the optimizer step, as there, or with `calculate_per_token_loss` by its tokens. Here it holds for every term
    of the loss, also KL and entropy, which the reference system reduces by its own. Args as `ReferenceAdvantages`.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.reducers", path, run_args)

    def __call__(self, view: ReductionView) -> NDArray[np.float64]:
        """Return the weight of each token [T].

        Raises:
            PluginError: the function returned something that does not reduce tokens to a number.
        """
        import numpy as np
        import torch

        per_token = bool(self._theirs.args.calculate_per_token_loss)
        lengths = [int(one) for one in view.response_lengths]
        totals = lengths if view.total_lengths is None else [int(one) for one in view.total_lengths]
        masks = list(torch.from_numpy(view.loss_mask.astype(np.float32)).split(lengths))
        reduce = self._theirs.on_whole(totals, lengths, masks, per_token)
        if not callable(reduce):
            raise self._theirs.refuse(reduce)
        losses = torch.ones(len(view.loss_mask), dtype=torch.float64, requires_grad=True)
        with whole_sequences(self._theirs.function):
            total = reduce(losses)
        if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.requires_grad:
            raise self._theirs.refuse(total)
        (weights,) = torch.autograd.grad(total.sum(), losses)
        by = float(view.loss_mask.sum()) if per_token else len(set(view.rollout_ids.tolist()))
        return np.asarray(weights.numpy(), dtype=np.float64) / max(by, 1)


def _needed(run_args: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the columns of a run: those that it has anyway."""
    given = run_args or {}
    ref = {"ref_log_probs"} if given.get("use_kl_loss") or given.get("kl_coef") else set()
    teacher = {"teacher_log_probs"} if given.get("use_opd") else set()
    return frozenset({"old_log_probs", "rollout_log_probs", "total_lengths"} | ref | teacher)


def _lengths(view: TokenView) -> list[int]:
    """Return the tokens of each sample in a view; samples of which it has none are left out."""
    import torch

    counts = torch.unique_consecutive(view.sample_of_token, return_counts=True)[1]
    return [int(one) for one in counts.tolist()]


def _data(view: TokenView) -> dict[str, Any]:
    """Return the samples of a view as they are there: a list for each column, an entry a sample."""
    import torch

    lengths = _lengths(view)
    samples = torch.unique_consecutive(view.sample_of_token)
    data: dict[str, Any] = {
        "response_lengths": lengths,
        "loss_masks": list(view.loss_mask.split(lengths)),
        "rewards": view.rewards[samples].tolist(),
        "unconcat_tokens": None,
    }
    for ours, theirs in _COLUMNS.items():
        column = getattr(view, ours)
        if column is not None:
            data[theirs] = list(column.split(lengths))
    if view.total_lengths is not None:
        data["total_lengths"] = view.total_lengths[samples].tolist()
    if view.group_ids is not None:
        data["group_indices"] = view.group_ids[samples].tolist()
    if view.train_metadata is not None:
        data["metadata"] = [view.train_metadata[place] for place in samples.tolist()]
    return data


def _sequences(view: TokenView) -> tuple[Any, dict[str, Any]]:
    """Return the logits [1, S, vocabulary] of the samples that `_data` returns, and the ids of these samples."""
    import torch

    totals = view.total_lengths.tolist()
    samples = torch.unique_consecutive(view.sample_of_token).tolist()
    logits, ids = view.sequence_logits, list(view.sequence_tokens.split(totals))
    if len(samples) < len(totals):
        parts = logits.split(totals)
        logits = torch.cat([parts[i] for i in samples])
    ids = [ids[i] for i in samples]
    return logits[None], {"unconcat_tokens": ids, "tokens": torch.cat(ids)[None]}


def _joined(theirs: Theirs, data: Mapping[str, Any], name: str, lengths: Sequence[int], like: Any) -> Any:
    import torch

    parts = data.get(name)
    if parts is None:
        raise PluginError(
            f"{theirs.who}: set no rollout_data[{name!r}]; wanted a list of tensors, one a sample"
        )
    tensors = [torch.as_tensor(part).reshape(-1) for part in parts]
    if [len(part) for part in tensors] != list(lengths):
        raise PluginError(
            f"{theirs.who}: {name} have the lengths {[len(part) for part in tensors][:9]}; wanted {list(lengths)[:9]}"
        )
    return torch.cat(tensors).to(like).detach()


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _mean(value: Any, view: TokenView) -> Any:
    """Return a metric: a number as it is, one for each token reduced as the loss is."""
    import torch

    if isinstance(value, list | tuple):
        value = torch.cat([torch.as_tensor(one).reshape(-1) for one in value])
    if isinstance(value, torch.Tensor) and value.shape == view.loss_mask.shape:
        return (value.to(view.loss_mask) * view.loss_mask).sum() / view.loss_mask.sum().clamp(min=1)
    return value.float().mean() if isinstance(value, torch.Tensor) else value
