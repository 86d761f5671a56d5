"""`TrainedModel`: a model (policy or critic) with its optimizer: forward passes and optimizer steps over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from slime_core.config.sections import TrainSection
from slime_core.protocols import Metrics
from slime_core.runtime.phase_times import PhaseTimes
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatch, MicroBatches
from slime_megatron.model.gpt import wrap_for_gradients
from slime_megatron.model.layers.router import (
    reset_loads,
    routers_of,
    take_losses,
    update_biases,
    updates_bias,
)
from slime_megatron.model.mtp import share_embedding
from slime_megatron.optim.offload import (
    OffloadedStorage,
    state_of,
    to_device,
    to_host,
    weights_of,
)
from slime_megatron.optim.optimizer import (
    build_optimizer,
    build_scheduler,
    learning_rate,
    loss_scaler,
    update,
)
from slime_megatron.optim.passes import ForEachMicroBatch, Passes
from slime_megatron.optim.skipped_steps import SkippedSteps
from slime_megatron.parallel.process_groups import World, device
from slime_megatron.settings.section import MegatronSection


class TrainedModel:
    """This rank's part of a model, wrapped for gradients, its optimizer and the schedule of its learning rate.

    Methods are collective over the world.

    Args:
        model: with its first weights; what is frozen is so already.
        train: settings of the optimizer.
        section: how the optimizer's state is shared, and how many optimizer steps in a row may be skipped.
        world: of the ranks.
        times: takes down micro-batches, and what an optimizer step consists of.
        total_steps: optimizer steps of the run; see `build_scheduler`.
        output_processor: what the model's output becomes; see `response_log_probs`.
        n_mtp_layers: MTP layers that are trained, on the last pipeline stage.
    """

    def __init__(
        self,
        model: GPTModel,
        train: TrainSection,
        section: MegatronSection,
        world: World,
        *,
        times: PhaseTimes,
        total_steps: int | None,
        output_processor: Callable[..., Any],
        n_mtp_layers: int = 0,
    ) -> None:
        self.model: DistributedDataParallel = wrap_for_gradients(model, section)
        self._updates_bias = updates_bias(section)
        self.model.config.finalize_model_grads_func = _finish_gradients
        #: This rank's routers, none in a model without experts; the second list has those of MTP layers, too.
        self.routers, self._all_routers = routers_of(model.decoder), routers_of(model)
        self.optimizer = build_optimizer(self.model, train, section)
        self.scheduler = build_scheduler(self.optimizer, train, total_steps=total_steps)
        self._clip_grad = train.clip_grad
        self.skipped_steps = SkippedSteps(section.max_skipped_steps)
        self._passes = Passes(self.model, world, times=times, output_processor=output_processor)
        self._world, self._times = world, times
        self._n_mtp_layers = n_mtp_layers
        self._offloaded: list[OffloadedStorage] = []
        self._offloaded_weights: list[OffloadedStorage] = []

    def forward(self, steps: Sequence[MicroBatches], like: Tensor, output: Callable[[Any], Tensor]) -> Tensor:
        """Return numbers for each response token of the batch, without gradient; see `Passes.forward`."""
        return self._passes.forward(steps, like, output)

    def take_step(self, step: MicroBatches, loss: ForEachMicroBatch) -> Metrics:
        """Take one optimizer step, unless its gradient is not finite.

        In float16 that is an overflow as long as the scale of the loss can still fall, and no sign of harm.

        Args:
            step: its micro-batches.
            loss: (micro-batch, output) -> (scalar share of the loss with gradient, shares of metrics).

        Returns:
            Sums of all ranks' shares of metrics, `loss` among them, the losses of routers, `lr`, and `grad_norm` if the
            step was taken.

        Raises:
            TrainerError: more steps in a row were skipped than allowed.
        """

        def share(micro: MicroBatch, output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value, metrics = loss(micro, output)
            n_tokens = torch.tensor(micro.columns.numel(), dtype=torch.int)
            return value, n_tokens, {"loss": value.detach(), **metrics}

        if self._n_mtp_layers:
            share_embedding(self.model.module)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._updates_bias:
            reset_loads(self._all_routers)
        with self._times.timed("forward_backward"):
            shares = self._passes.run(step, share, forward_only=False)
        metrics: Metrics = dict(self._world.sum_over_ranks(_sums(shares)))
        metrics |= take_losses(
            self._all_routers, self.model.config, device=device(), n_mtp_layers=self._n_mtp_layers
        )
        metrics["lr"] = learning_rate(self.optimizer)
        scaler = loss_scaler(self.optimizer)
        can_fall = scaler is not None and scaler.can_fall
        if scaler is not None:
            metrics["loss_scale"] = float(scaler.scale)
        with self._times.timed("optimizer_update"):
            norm = update(self.optimizer, clip_grad=self._clip_grad, trains_mtp=self._n_mtp_layers > 0)
        if math.isfinite(norm):
            self.scheduler.step(1)
            if self._updates_bias:
                update_biases(self._all_routers, rate=self.model.config.moe_router_bias_update_rate)
            self.skipped_steps.in_a_row = 0
            metrics["grad_norm"] = norm
        elif not can_fall:
            self.skipped_steps.add(norm)
        return metrics

    def offload(self) -> None:
        """Move the optimizer's state to the host and free the gradients. Nothing to do on a CPU."""
        if torch.cuda.is_available():
            self._offloaded = to_host(state_of(self.optimizer), device(), but=self.model.parameters())
            self.model.offload_grad_buffers()

    def offload_weights(self) -> None:
        """Move weights and buffers to the host. Nothing to do on a CPU, or where they are there."""
        if torch.cuda.is_available() and not self._offloaded_weights:
            self._offloaded_weights = to_host(weights_of(self.model.module), device())

    def onload_weights(self) -> None:
        """Undo `offload_weights`."""
        to_device(self._offloaded_weights)
        self._offloaded_weights = []

    def onload(self) -> None:
        """Undo `offload` and `offload_weights`."""
        self.onload_weights()
        if torch.cuda.is_available():
            self.model.restore_grad_buffers()
            to_device(self._offloaded)
            self._offloaded = []


def average(steps: Sequence[Metrics], *, prefix: str) -> Metrics:
    """Return each metric's mean over the optimizer steps that have it, and how many steps were skipped."""
    names = dict.fromkeys(name for step in steps for name in step)
    means = {
        name: sum(step[name] for step in steps if name in step) / sum(name in step for step in steps)
        for name in names
    }
    means["skipped_steps"] = float(sum("grad_norm" not in step for step in steps))
    return {f"{prefix}{name}": value for name, value in means.items()}


def _sums(shares: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sum of each metric over micro-batches; only the last pipeline stage has any. Waits for the device once."""
    names = list(shares[0]) if shares else []
    sums = {name: sum(share[name] for share in shares) for name in names}
    of_device = {
        name: value.double().reshape(())
        for name, value in sums.items()
        if isinstance(value, Tensor) and value.device.type != "cpu"
    }
    read = torch.stack(list(of_device.values())).tolist() if of_device else []
    return {name: float(value) for name, value in (sums | dict(zip(of_device, read, strict=True))).items()}


def _finish_gradients(model: list[Any], _num_tokens: Tensor | None, **groups: Any) -> None:
    """Sum gradients over ranks. Without the number of tokens, by which Megatron would divide: shares add up."""
    finalize_model_grads(model, None, **groups)
