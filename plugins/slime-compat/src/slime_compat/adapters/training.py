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
from slime_compat.adapters.columns import columns_of, divergence_of, lengths_of, naming_columns, sequences_of
from slime_compat.adapters.whole import whole_sequences
from slime_compat.views.training.logits import Logits
from slime_compat.views.training.policy import lacking_in_default_loss

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Estimators whose rewards are compared within their group.
_GROUPED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
#: Estimators whose names choose the objective of the policy loss there, too, whatever gives the advantages.
_LOSSES = {"gspo": "gspo_loss", "cispo": "cispo_loss"}
#: The estimator whose name says there that a critic is trained.
_WITH_CRITIC = "ppo"
_TOLERANCE = 1e-4
#: Functions that take each tensor-parallel rank to have some columns of logits.
_DEFAULT_LOSS = "policy_loss_function"
_OF_SHARDS = ("vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy", "all_reduce")


class ReferenceAdvantages:
    """Calls `fn(args, rollout_data)`, which sets `advantages` and `returns`.

    What all estimators of slime-algos do beside their own credit is done with these advantages, as there: distillation, then
    whitening; importance weights and rejection go with them. The KL divergence is not taken off them: `rollout_data["kl"]` has it,
    without its coefficient, `args.kl_coef`, and the function makes of it what it likes.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.advantages", path, run_args)
        given = run_args or {}
        estimator = str(given.get("advantage_estimator"))
        self.reward_transform = "group-norm" if estimator in _GROUPED else "raw"
        """As of the estimator that it takes the place of."""
        self.loss = _LOSSES.get(estimator, "policy_loss")
        """As of that estimator, too."""
        self.keywords: dict[str, Any] = {}
        """Options that all estimators of slime-algos take, from its section."""
        self._needs = _needed(run_args) | ({"values"} if estimator == _WITH_CRITIC else set())
        self._estimate: Any = None
        # The section is there where slime-algos is; without it nobody can set these options.
        if "algos_use_tis" in given:
            self._estimate = self._decorated()
            options = {name: f"algos_{name}" for name in self._estimate.options_from}
            self.keywords = {name: given[key] for name, key in options.items() if key in given}
            if given.get("custom_tis_function_path") is not None:
                self.keywords["use_tis"] = False  # that function takes its place

    def needs(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that the function finds, and those that the options read."""
        return self._needs if self._estimate is None else self._needs | self._estimate.needs(options)

    def gives_importance(self, options: Mapping[str, Any]) -> bool:
        """Return whether there are importance weights."""
        return self._estimate is not None and bool(self._estimate.gives_importance(options))

    def __call__(self, view: TokenView, *, state: Mapping[str, float] | None = None) -> tuple[Any, ...]:
        """Return (advantages, returns), [T] each, and what else an estimator returns.

        Raises:
            PluginError: the function left one out, or of another shape, or asked for a column that is not there.
        """
        if self._estimate is None:
            return self._credited(view)
        if state and self.keywords["kl_target"] is not None:
            self._theirs.args.kl_coef = state["kl_coef"]
        answer: tuple[Any, ...] = self._estimate(view, given=view, state=state, **self.keywords)
        return answer

    def _decorated(self) -> Any:
        """Return an estimator as slime-algos makes one, whose credit is the function's."""
        from slime_algos.decorators.estimator import estimator

        def credit(view: TokenView, kl: Any, *, given: TokenView) -> tuple[Any, Any]:
            return self._credited(given)  # whose columns are not 0 where the mask is, as there

        credit.__name__ = self._theirs.who
        return estimator(reward_transform=self.reward_transform)(credit)

    def _credited(self, view: TokenView) -> tuple[Any, Any]:
        """Return (advantages, returns) as the function gives them."""
        args, lengths = self._theirs.args, lengths_of(view)
        kl = divergence_of(view, kl_coef=args.kl_coef, kl_loss_type=args.kl_loss_type)
        data = columns_of(view) | {"kl": kl}
        with naming_columns(self._theirs.who, data):
            self._theirs.on_whole(args, data)
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
        lengths = lengths_of(view)
        batch = columns_of(view) | {"advantages": list(advantages.split(lengths))}
        logits: Any = Logits(view.log_probs, view.entropy, lengths)
        if self._wants_logits:
            logits, sequences = sequences_of(view)
            batch |= sequences
        with naming_columns(self._theirs.who, batch):
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

        lengths = lengths_of(view)
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
