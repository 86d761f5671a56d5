"""Views for tests of estimators and losses, by hand and random ragged ones; and their contract kits.

The other kinds' kits are in `slime_core.testing.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from slime_core.errors import SlimeError
from slime_core.protocols import TokenView, needs_of
from slime_core.protocols.correction import Correction
from slime_core.testing.contracts.kit import Kit
from slime_core.testing.contracts.promises import answering, name_of, require
from torch import Tensor

from slime_algos.greedy_baseline import IS_BASELINE

Rows = Sequence[Sequence[float]]
"""One list a sample, one number a token."""


def view_of(masks: Rows, *, rewards: Sequence[float] | None = None, **columns: Any) -> TokenView:
    """Return a float64 view of some samples.

    Args:
        masks: loss mask of each sample.
        rewards: one a sample; 0 when not given.
        columns: other fields of the view; a [T] column as `Rows` or as a flat tensor, `train_metadata` as it is. By default trained tokens
            all weigh the same, together 1, and old log-probs are 0.
    """
    lengths = torch.tensor([len(mask) for mask in masks])
    mask = _flat(masks)
    fields = {
        "weights": mask / mask.sum().clamp(min=1),
        "old_log_probs": torch.zeros_like(mask),
    } | {name: values if name == "train_metadata" else _flat(values) for name, values in columns.items()}
    return TokenView(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        sample_of_token=torch.repeat_interleave(torch.arange(len(masks)), lengths),
        loss_mask=mask,
        rewards=torch.as_tensor(rewards if rewards is not None else [0.0] * len(masks), dtype=torch.float64),
        **fields,
    )


def random_view(seed: int, *, n_samples: int = 8, longest: int = 9, masked: float = 0.3) -> TokenView:
    """Return a float64 view whose every column is random; `log_probs` and `new_values` want gradients.

    Samples differ in length, each token is masked with probability `masked`, and one sample is masked whole.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, n_samples)
    masks = [(rng.random(length) >= masked).astype(float).tolist() for length in lengths]
    masks[n_samples // 2] = [0.0] * int(lengths[n_samples // 2])

    def normal(scale: float = 1.0) -> Tensor:
        return torch.as_tensor(rng.normal(size=int(lengths.sum())) * scale)

    log_probs = -normal().abs()
    near = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs")
    return view_of(
        masks,
        rewards=rng.normal(size=n_samples).tolist(),
        log_probs=log_probs.clone().requires_grad_(),
        entropy=normal().abs(),
        values=normal(),
        new_values=normal().requires_grad_(),
        sum_pi_squared=log_probs.exp().square(),
        **{name: log_probs + normal(0.5) for name in near},
        staleness=torch.as_tensor(rng.integers(0, 3, int(lengths.sum()))),
    )


def corrected(view: TokenView, correction: Correction) -> TokenView:
    """Return the view that losses see under a correction whose rejected tokens count, as trainers make it."""
    kept = torch.ones_like(view.loss_mask) if correction.kept is None else correction.kept
    mask, weights = view.loss_mask * kept, view.weights * kept
    return replace(view, loss_mask=mask, weights=weights, importance=correction.importance)


def grouped_view(seed: int) -> TokenView:
    """Return a random view as estimators get it: groups of two samples, of which the first is a baseline."""
    view = random_view(seed)
    n = len(view.rewards)
    metadata = [{IS_BASELINE: i % 2 == 0} for i in range(n)]
    return replace(
        view,
        group_ids=torch.arange(n) // 2,
        log_probs=None,
        reward_parts={"part": view.rewards.clone()},
        train_metadata=metadata,
    )


def check_advantage(
    estimator: Callable[..., Any], *, view: TokenView | None = None, options: Mapping[str, Any] | None = None
) -> None:
    """Check an estimator: what it declares, finite credits [T] without gradient, whatever masked tokens hold.

    Args:
        estimator: the function.
        view: of float64 columns; `grouped_view(0)` when not given.
        options: its keyword-only parameters.

    Raises:
        ContractError: says which promise is broken.
    """
    where, given, chosen = f"estimator {name_of(estimator)}", view or grouped_view(0), options or {}
    transform = getattr(estimator, "reward_transform", None)
    wanted = "the name of a reward transform, such as 'group-norm' or 'raw'"
    require(isinstance(transform, str), where, found=f"reward_transform {transform!r}", wanted=wanted)
    _check_needs(where, estimator, chosen)
    credits = []
    for each in (given, _spoilt(given)):
        with answering(where, "(advantages, returns), and perhaps metrics"):
            answer = estimator(each, **chosen)
        is_tuple = isinstance(answer, tuple) and len(answer) >= 2
        require(
            is_tuple, where, found=type(answer).__name__, wanted="a tuple (advantages, returns[, metrics])"
        )
        for name, column in zip(("advantages", "returns"), answer[:2], strict=True):
            _check_column(f"{where}: {name}", column, given.loss_mask)
        _check_metrics(where, answer[2] if len(answer) > 2 else {})
        credits.append([column[given.loss_mask > 0] for column in answer[:2]])
    for clean, dirty in zip(*credits, strict=True):
        same = torch.equal(clean, dirty)
        require(
            same, where, found="credits that change with masked tokens", wanted="that they count for nothing"
        )


def check_loss(
    loss: Callable[..., Any],
    *,
    view: TokenView | None = None,
    options: Mapping[str, Any] | None = None,
    adds_up: bool = True,
) -> None:
    """Check a loss: a finite scalar and gradient, whatever masked tokens hold; shares of micro-batches add up to the whole.

    Args:
        loss: the function, of a policy or of a critic.
        view: of float64 columns, its `log_probs` and `new_values` with gradient; `random_view(0)` when not given.
        options: its keyword-only parameters.
        adds_up: whether the cuts make no difference; False for one that selects some of a micro-batch's tokens by comparing them.

    Raises:
        ContractError: says which promise is broken.
    """
    where, given, chosen = f"loss {name_of(loss)}", view or random_view(0), options or {}
    _check_needs(where, loss, chosen)
    advantages = torch.linspace(-1.5, 2.0, len(given.loss_mask), dtype=torch.float64)
    whole, gradients = _computed(where, loss, given, advantages, chosen)
    dirty = torch.where(given.loss_mask > 0, advantages, torch.nan)
    other, other_gradients = _computed(where, loss, _spoilt(given), dirty, chosen)
    same = torch.equal(whole, other) and all(map(torch.equal, gradients, other_gradients))
    require(same, where, found=f"{whole:.6g}, and {other:.6g} with other masked tokens", wanted="one loss")
    if not adds_up:
        return
    n = len(given.rewards)
    parts = [_cut(given, first, min(first + 3, n)) for first in range(0, n, 3)]
    shares = [_computed(where, loss, part, advantages[tokens], chosen) for part, tokens in parts]
    total = torch.stack([share for share, _ in shares]).sum()
    found = f"{total:.6g} from micro-batches and {whole:.6g} at once"
    require(
        torch.allclose(total, whole, rtol=1e-9), where, found=found, wanted="shares that add up: view.reduce"
    )
    for i, gradient in enumerate(gradients):
        summed = torch.cat([each[i] for _, each in shares])
        found, wanted = "gradients that depend on micro-batches", "the same, however a step is cut"
        require(torch.allclose(summed, gradient, rtol=1e-9), where, found=found, wanted=wanted)


def _check_whole_loss(loss: Callable[..., Any]) -> None:
    """Check a loss at once: whether one that is cut adds up is for its author to say."""
    check_loss(loss, adds_up=False)


#: The entry points `advantages` and `losses` of `slime.kits`.
ADVANTAGE_KIT = Kit(check_advantage, refusals=(SlimeError,))
LOSS_KIT = Kit(_check_whole_loss, refusals=(SlimeError,))


def _computed(
    where: str, loss: Callable[..., Any], view: TokenView, advantages: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Return a loss, detached, and its gradients by log-probs and values, checked."""
    with answering(where, "(loss, metrics)"):
        answer = loss(view, advantages, **options)
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    require(is_pair, where, found=type(answer).__name__, wanted="a pair (loss, metrics)")
    value, metrics = answer
    is_scalar = isinstance(value, Tensor) and value.shape == ()
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    require(is_scalar, where, found=f"a loss of {shape}", wanted="a scalar tensor")
    require(bool(torch.isfinite(value)), where, found=f"the loss {value}", wanted="a finite number")
    _check_metrics(where, metrics)
    learnt = [view.log_probs, view.new_values]
    require(
        value.requires_grad, where, found="a loss without gradient", wanted="one that log_probs can learn by"
    )
    found = torch.autograd.grad(value, learnt, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(learnt, found, strict=True)]
    for name, gradient in zip(("log_probs", "new_values"), gradients, strict=True):
        _check_finite(f"{where}: the gradient by {name}", gradient)
    return value.detach(), gradients


def _check_needs(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(TokenView)}
    with answering(f"{where}: needs", "fields of TokenView"):
        needs = set(needs_of(function, options))
    require(needs <= known, f"{where}: needs", found=sorted(needs - known), wanted="fields of TokenView")


def _check_column(where: str, column: Any, mask: Tensor) -> None:
    found = f"shape {tuple(column.shape)}" if isinstance(column, Tensor) else type(column).__name__
    fits = isinstance(column, Tensor) and column.shape == mask.shape
    require(fits, where, found=found, wanted=f"a tensor [T], here [{len(mask)}]")
    _check_finite(where, column)
    require(not column.requires_grad, where, found="a gradient", wanted="none")


def _check_finite(where: str, column: Tensor) -> None:
    odd = (~torch.isfinite(column)).nonzero().flatten().tolist()
    found = f"{column[odd[0]].item()} at token {odd[0]}" if odd else ""
    require(not odd, where, found=found, wanted="finite numbers")


def _check_metrics(where: str, metrics: Any) -> None:
    require(
        isinstance(metrics, Mapping),
        where,
        found=f"metrics {type(metrics).__name__}",
        wanted="name -> scalar",
    )
    for name, value in metrics.items():
        kept = not (isinstance(value, Tensor) and (value.requires_grad or value.numel() != 1))
        require(kept, f"{where}: {name}", found="a gradient or several numbers", wanted="a detached scalar")
        require(bool(np.isfinite(float(value))), f"{where}: {name}", found=value, wanted="a finite number")


#: Columns [T] that hold anything where nothing is trained on.
_LOOSE = (
    "old_log_probs", "log_probs", "entropy", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "sum_pi_squared",
    "values", "new_values", "importance",
)  # fmt: skip


def _spoilt(view: TokenView) -> TokenView:
    """Return the view with NaN at its masked tokens."""
    columns = {}
    for name in _LOOSE:
        column = getattr(view, name)
        if column is not None:
            spoilt = torch.where(view.loss_mask > 0, column.detach(), torch.nan)
            columns[name] = spoilt.requires_grad_(column.requires_grad)
    return replace(view, **columns)


def _cut(view: TokenView, first: int, end: int) -> tuple[TokenView, slice]:
    """Return the samples from `first` to before `end` as a micro-batch, and where their tokens are."""
    tokens = slice(int(view.offsets[first]), int(view.offsets[end]))
    columns: dict[str, Any] = {
        name: getattr(view, name)[tokens]
        for name in (*_LOOSE, "loss_mask", "weights", "staleness")
        if getattr(view, name) is not None
    }
    for name in ("log_probs", "new_values"):
        columns[name] = columns[name].detach().requires_grad_()
    return replace(
        view,
        offsets=view.offsets[first : end + 1] - view.offsets[first],
        sample_of_token=view.sample_of_token[tokens] - first,
        rewards=view.rewards[first:end],
        **columns,
    ), tokens


def _flat(values: Any) -> Any:
    if not isinstance(values, Sequence):
        return values
    return torch.tensor([x for row in values for x in row], dtype=torch.float64)
