"""MoE router for packed sequences: losses as shares of the whole optimizer step, and routing replay.

The losses are Megatron's own flags. With N the tokens of the optimizer step's samples, p a token's softmax over the E
experts (its sigmoid scores over their sum, where scores are sigmoids), and f the share of each expert in the top-k choices of
a set of tokens (always by the scores alone, also where routes are replayed or the router has a bias):

    aux_loss         coefficient * E / N * sum over tokens and experts of f * p; f of the token's micro-batch
    global_aux_loss  the same; f of all tokens that all ranks have routed in this optimizer step so far
    seq_aux_loss     coefficient * mean over samples of E * sum over experts of f * (mean of p); both of the sample
    z loss           coefficient / N * sum over tokens of logsumexp(logits) ** 2

A token that samples share counts once for each; padding and micro-batches that do not count for the loss never do.
Except for the f of the first two, nothing depends on how a step is divided into micro-batches. Megatron's own scaling
assumes micro-batches of one size and a loss that is divided by tokens later.

The bias of a router that has one is updated after each optimizer step that is taken, if `updates_bias`, by Megatron's
`moe_router_bias_update_rate` x sign(mean load - load): the load of an expert is how many tokens of the step went there, all
micro-batches and ranks together, counted as above. Source: arXiv 2408.15664, algorithm 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from slime_core.errors import TrainerError
from torch import Tensor
from torch.nn import Module

from slime_megatron.batch.routing import RoutedTokens
from slime_megatron.model.transformer_config import has_experts
from slime_megatron.settings.section import MegatronSection

#: Kind of balancing loss -> the name under which it is reported.
_REPORTED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
RECORD, REPLAY = RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD


class PackedRouter(TopKRouter):
    """Megatron's router, its losses as defined above."""

    #: Tokens of the micro-batch that is being forwarded; set by `RoutedLayer`.
    tokens: RoutedTokens

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: This rank's shares of losses, without their coefficients, since `take_losses`.
        self.losses: dict[str, Tensor] = {}
        #: float64 [E]: tokens that were routed to each expert in training passes; None where the bias is not updated.
        self.load: Tensor | None = None
        self.frozen_expert_bias = True  # Megatron would update it before the step, also if that is skipped
        RouterReplay.clear_global_router_replay_instances()  # Megatron's list of all of them would keep them for ever

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Megatron's (probabilities, map); routes are recorded or replayed where `replay` says so."""
        replay = self.router_replay
        action = None if replay is None else replay.router_replay_action
        if action is REPLAY:
            given = self.tokens.routes[self.layer_number]
            replay.set_target_indices(given.to(logits.device, torch.int64, non_blocking=True))
        found: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
        if action is RECORD:
            recorded = replay.get_recorded_indices().to(torch.int16)
            self.tokens.routes[self.layer_number] = recorded.to("cpu", non_blocking=True)
        if action is not None:
            replay.clear_indices()
        return found

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits with the gradient of the z loss."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = self.tokens.copies @ torch.logsumexp(logits.float(), dim=-1).square()
        return self._attach(logits, "z_loss", coefficient, squares / self.tokens.step.n_tokens)

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, **_: Any) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts = _summed(self._per_token(routing_map), self.tp_cp_group)
        return self._attach(probs, _REPORTED["aux_loss"], coefficient, self._balance(counts, scores))

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, **_: Any) -> Tensor:
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        self.global_tokens_per_expert += _summed(self._per_token(routing_map), self.tp_dp_cp_group)
        loss = self._balance(self.global_tokens_per_expert.clone(), scores)
        return self._attach(probs, _REPORTED["global_aux_loss"], coefficient, loss)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        counts = _summed(self._per_sample(routing_map), self.tp_cp_group)
        chosen = counts.sum(-1, keepdim=True).clamp(min=1)
        means = self._per_sample(scores) / (chosen / self.topk)
        loss = self.num_experts * (counts / chosen * means).sum() / self.tokens.step.n_samples
        return self._attach(probs, _REPORTED["seq_aux_loss"], coefficient, loss)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, once for each sample that they are part of."""
        if self.load is not None and self.training and torch.is_grad_enabled():
            self.load += self._per_token(routing_map).double()

    def _balance(self, counts: Tensor, scores: Tensor) -> Tensor:
        """Return this rank's share of E / N * sum(f * p); `counts` [E] are those that f is made of."""
        shares = counts / counts.sum().clamp(min=1)
        share: Tensor = self.num_experts * (shares @ self._per_token(scores)) / self.tokens.step.n_tokens
        return share

    def _per_token(self, values: Tensor) -> Tensor:
        """Return the sum [E] of `values` [t, E] over all samples' tokens."""
        return self.tokens.copies @ values.float()

    def _per_sample(self, values: Tensor) -> Tensor:
        """Return the sums [n, E] of `values` [t, E] over each sample's tokens."""
        tokens = self.tokens
        real = values.float() * (tokens.copies > 0)[:, None]
        segments = real.new_zeros(tokens.n_segments, values.shape[1]).index_add(0, tokens.segment, real)
        samples = segments.new_zeros(tokens.n_samples, values.shape[1])
        return samples.index_add(0, tokens.path_samples, segments[tokens.path_segments])

    def _attach(self, activation: Tensor, name: str, coefficient: float, loss: Tensor) -> Tensor:
        """Return `activation` with the gradient of a loss, of which this rank has a share, and report the share."""
        self.losses[name] = self.losses.get(name, 0.0) + loss.detach()
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, coefficient * loss)
        return attached


class RoutedLayer(TransformerLayer):
    """Megatron's layer, which passes the micro-batch's tokens to its router, also when it is recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what Megatron's layer does."""
        self.mlp.router.tokens = kwargs["packed_seq_params"].routed
        return super().forward(*args, **kwargs)


def with_router(mlp: partial[Any]) -> partial[Any]:
    """Return Megatron's builder of a layer's experts with `PackedRouter` as their router."""
    submodules = mlp.keywords["submodules"]
    return partial(mlp, submodules=type(submodules)(**{**vars(submodules), "router": PackedRouter}))


def updates_bias(section: MegatronSection) -> bool:
    """Return whether the bias of routers is updated; else it stays as the model's folder has it."""
    return bool(section.megatron_args.get("moe_router_enable_expert_bias"))


def check_routers(model: Module, config: TransformerConfig, *, updates_bias: bool = False) -> None:
    """Check that a model from a custom provider has our routers, where router losses, replay or bias updates are asked for.

    Raises:
        TrainerError: it has Megatron's own, which would do otherwise; says what to do.
    """
    coefficients = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    asked = (
        updates_bias
        or config.moe_enable_routing_replay
        or any(any(each) if isinstance(each, list) else each for each in coefficients)
    )
    for module in model.modules():
        if asked and isinstance(module, TopKRouter) and not isinstance(module, PackedRouter):
            raise TrainerError(
                f"custom_model_provider_path: the model has routers of {type(module).__module__}.{type(module).__name__}, "
                "whose losses are for micro-batches of one size, and which replay nothing; build its layers by "
                "slime_megatron.model.layer_spec.layer_spec, or drop the flags of router losses, replay and bias"
            )


def routers_of(model: Module) -> list[PackedRouter]:
    """Return the routers of this rank's part of a model."""
    return [module for module in model.modules() if isinstance(module, PackedRouter)]


@contextlib.contextmanager
def replay(routers: Iterable[PackedRouter], action: RouterReplayAction | None) -> Iterator[None]:
    """Let routers RECORD the experts of micro-batches, REPLAY those that a micro-batch has, or choose freely (None)."""
    if action is None:
        yield
        return
    for router in routers:
        router.router_replay.set_router_replay_action(action)
    try:
        yield
    finally:
        for router in routers:
            router.router_replay.clear_router_replay_action()


def take_losses(
    routers: list[PackedRouter], config: TransformerConfig, *, device: torch.device, n_mtp_layers: int = 0
) -> dict[str, float]:
    """Return each router loss of the optimizer step, as the mean over layers, and reset it. Collective over the world.

    A pipeline stage may have no router. The mean includes `n_mtp_layers` MTP layers, which `config` does not count.
    """
    names = _losses_of(config)
    if not names:
        return {}
    own = torch.zeros(len(names), device=device)
    for router in routers:
        own += torch.stack([router.losses[name] for name in names])
        router.losses = {}
    dist.all_reduce(own)
    n_layers = n_mtp_layers + sum(has_experts(config, layer) for layer in range(config.num_layers))
    return dict(zip(names, (own / n_layers).tolist(), strict=True))


def _losses_of(config: TransformerConfig) -> list[str]:
    """Return the metric names of the router losses that are asked for."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if not isinstance(kinds, list):
        kinds, coefficients = [kinds], [coefficients]
    if config.num_moe_experts is None:
        return []
    found = [
        _REPORTED[kind] for kind, each in zip(kinds, coefficients, strict=True) if each and kind in _REPORTED
    ]
    return found + (["z_loss"] if config.moe_z_loss_coeff is not None else [])


@torch.no_grad()
def update_biases(routers: Sequence[PackedRouter], *, rate: float) -> None:
    """Update the bias of each router by its load since `reset_loads`. Collective over the ranks of a pipeline stage."""
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])  # type: ignore[misc]  # `reset_loads` set them
    dist.all_reduce(loads, group=routers[0].tp_dp_cp_group)
    for router, moved in zip(routers, (loads.mean(-1, keepdim=True) - loads).sign(), strict=True):
        router.expert_bias += rate * moved.float()


def reset_loads(routers: Iterable[PackedRouter]) -> None:
    """Let routers count the tokens of each expert, from 0."""
    for router in routers:
        router.load = torch.zeros(router.num_experts, dtype=torch.float64, device=router.weight.device)


def _summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return counts of all ranks of a group; they have no gradient."""
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts
