"""From rewards to the loss and its gradient under the conventions of a framework."""

from __future__ import annotations

from typing import Any

from slime_algos import reducers
from slime_algos.advantages.grpo import grpo
from slime_algos.losses.policy import policy_loss
from slime_algos.numerics import Conventions
from slime_core.plugins.bind import bind, choose_options
from slime_core.protocols import Reducer
from slime_core.rewards.transforms import group_norm
from torch import Tensor

from slime_bench.conformance.case import Case

REDUCERS: dict[str, Reducer] = {"sample-mean": reducers.sample_mean, "token-mean": reducers.token_mean}
KL_COEF = 0.1


def grpo_step(conventions: Conventions, case: Case, *, kl: bool = True) -> Tensor:
    """Return the GRPO loss of raw rewards, with a KL term unless `kl` is false, and its gradient, [1 + T].

    Options reach the functions as settings do in a run.
    """
    algorithm, algos = conventions["algorithm"], conventions["algos"]

    def with_options(function: Any, section: Any) -> Any:
        return bind(function, choose_options(function, where="numerics", explicit={}, section=section))

    view = case.rewarded(with_options(group_norm, algorithm))
    advantages, *_ = with_options(grpo, algos)(view)
    weighted = case.weighted(with_options(REDUCERS[algorithm["loss_reducer"]], algos))
    loss, _ = with_options(policy_loss, {**algos, "use_kl_loss": kl, "kl_loss_coef": KL_COEF})(
        weighted, advantages
    )
    return case.with_gradient(loss)
