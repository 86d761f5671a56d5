"""What tests ask of each rank. Every job builds a `Learner`, and returns what a test compares; that is sent from the host."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from algorithms import policy_gradient, policy_gradient_by
from held_bytes import bytes_of
from rank_learners import (
    check_stages,
    gather_gradients,
    gradients_of,
    learner_of,
    moments_of,
    weights_of,
)
from rank_shares import bucket_padding as bucket_padding
from rank_shares import checkpoint_bytes as checkpoint_bytes
from rank_shares import train_aligned as train_aligned
from slime_core.config.sections import TrainSection
from slime_core.errors import TrainerError
from slime_core.protocols import Columns
from slime_core.run.assemble import Algorithm
from slime_core.samples import TrainBatch
from slime_megatron import compat
from slime_megatron.batch.sampling_mask import SamplingMask
from slime_megatron.hf.shard import whole_tensors
from slime_megatron.learner.frozen_learner import FrozenLearner
from slime_megatron.learner.learner import Learner
from slime_megatron.model.log_probs import VocabularyShard, sum_pi_squared, token_log_probs
from slime_megatron.model.lora import adapter_weights
from slime_megatron.parallel.process_groups import device
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection
from slime_models.hf.config import read_config
from tiny_models import FAMILIES
from torch import Tensor


def train(
    *, folder: Path, batch: TrainBatch, megatron: dict[str, Any], train: dict[str, Any], n_steps: int = 1
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Train `n_steps` times on a batch; return first metrics, first gradients, last weights; tensors from rank 0."""
    with learner_of(folder, megatron, train) as learner:
        metrics = learner.train(batch)
        gradients = gradients_of(learner)
        for _ in range(n_steps - 1):
            learner.train(batch)
        weights = weights_of(learner)
    return (metrics, gradients, weights) if dist.get_rank() == 0 else (metrics, {}, {})


def gradients_by(
    *, folder: Path, batch: TrainBatch, megatron: dict[str, Any], read: str
) -> dict[str, Tensor]:
    """Return the gradients of a policy gradient whose log-probs are taken from a field of the view; rank 0's."""
    with learner_of(
        folder, megatron, {"max_tokens_per_gpu": 40}, algorithm=policy_gradient_by(read)
    ) as learner:
        learner.train(batch)
        gradients = gradients_of(learner)
    return gradients if dist.get_rank() == 0 else {}


def held_bytes(
    *,
    folder: Path,
    batch: TrainBatch,
    megatron: dict[str, Any],
    train: dict[str, Any],
    lora: LoraSection | None,
) -> tuple[int, int, int]:
    """Train once; return this rank's bytes of weights, of gradient buffers, and of the optimizer's state."""
    with learner_of(folder, megatron, train, lora) as learner:
        learner.train(batch)
        return bytes_of(learner)


def routes_of_passes(
    *, folder: Path, batch: TrainBatch, megatron: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], float]:
    """Train on a batch of several optimizer steps; return where its routers sent tokens before, and in training.

    And the largest entry of this rank's gradients of routers in the last step.
    """
    before: list[Tensor] = []
    after: list[Tensor] = []

    def keep(_router: Any, _arguments: Any, output: tuple[Tensor, Tensor]) -> None:
        (after if torch.is_grad_enabled() else before).append(output[1].clone())

    with learner_of(folder, megatron, {"lr": 1.0, "max_tokens_per_gpu": 20}) as learner:
        routers = learner._policy.routers
        for router in routers:
            router.register_forward_hook(keep)
        learner.train(batch)
        return before, after, max(float(router.weight.main_grad.abs().max()) for router in routers)


def export(*, folder: Path, megatron: dict[str, Any], dtype: str) -> tuple[list[int], dict[str, Tensor]]:
    """Return the bytes of each bucket of weights, and the weights; every rank checks that it got those of rank 0."""
    with learner_of(folder, megatron, {}) as learner:
        sizes, weights = [], {}
        for bucket in learner.weights(dtype):
            sizes.append(sum(tensor.nbytes for _, tensor in bucket))
            weights |= {name: tensor.clone() for name, tensor in bucket}
        check_stages(learner, dtype, weights)
    for tensor in weights.values():
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)
    return sizes, weights if dist.get_rank() == 0 else {}


def save_and_go_on(
    *,
    folder: Path,
    checkpoint: Path,
    batches: list[TrainBatch],
    megatron: dict[str, Any],
    moments: bool,
    train: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on the first two batches, save, and go on; return state when saved, and metrics after it.

    The last rank writes when all have trained on, and no rank says that it is done before.
    """
    with learner_of(folder, megatron, {"lr": 1e-3} | (train or {})) as learner:
        for batch in batches[:2]:
            learner.train(batch)
        may_write = threading.Event()
        if dist.get_rank() == dist.get_world_size() - 1:
            learner._checkpoint_writer._thread.submit(may_write.wait)
        learner.save(checkpoint, in_background=True)
        state = {"weights": weights_of(learner), "moments": moments_of(learner) if moments else {}}
        state["metrics"] = [learner.train(batch) for batch in batches[2:]]
        assert not learner.written(wait=False)
        may_write.set()
        assert learner.written(wait=True)
        return state


def resume(
    *, folder: Path, checkpoint: Path, batches: list[TrainBatch], megatron: dict[str, Any], moments: bool
) -> dict[str, Any]:
    """Load, and go on; return state when loaded, and metrics after it."""
    with learner_of(folder, megatron, {"lr": 1e-3}) as learner:
        learner.load(checkpoint)
        state = {"weights": weights_of(learner), "moments": moments_of(learner) if moments else {}}
        return state | {"metrics": [learner.train(batch) for batch in batches[2:]]}


def load_and_save(
    *,
    folder: Path,
    checkpoint: Path,
    megatron: dict[str, Any],
    output: Path,
    batches: list[TrainBatch],
    train: dict[str, Any],
) -> list[dict[str, float]]:
    """Load, save to another folder, and go on as `save_and_go_on`; return metrics."""
    with learner_of(folder, megatron, {"lr": 1e-3} | train) as learner:
        learner.load(checkpoint)
        learner.save(output)
        return [learner.train(batch) for batch in batches[2:]]


def redirects_taken(*, folder: Path, batch: TrainBatch, megatron: dict[str, Any]) -> list[str]:
    """Train once; return the redirects of `compat` that were taken."""
    installed = compat.install()
    installed.hits.clear()
    with learner_of(folder, megatron, {}) as learner:
        learner.train(batch)
    return [name for name, taken in installed.hits.items() if taken]


def spoil(parameter: Tensor) -> None:
    """Put a NaN into a parameter's gradient."""
    parameter.main_grad.view(-1)[0] = float("nan")


def train_adapters(
    *,
    folder: Path,
    batches: list[TrainBatch],
    megatron: dict[str, Any],
    train: dict[str, Any],
    lora: LoraSection,
    output: Path,
    load: Path | None = None,
) -> dict[str, Any]:
    """Train on the batches, save to `output`, and train on the last again; return what all ranks know of that step.

    Args:
        folder: of the base model.
        batches: a step each.
        megatron: layout.
        train: settings of the optimizer.
        lora: the adapters.
        output: gets the checkpoint, and in `peft` the adapters.
        load: checkpoint to go on from, before the last batch, in the place of training.
    """
    with learner_of(folder, megatron, train, lora) as learner:
        if load is None:
            for batch in batches:
                learner.train(batch)
            learner.save(output)
            learner.save_hf(output / "peft")
        else:
            learner.load(load)
        before = weights_of(learner)
        metrics = learner.train(batches[-1])
        family, architecture = learner._settings.family, learner._architecture
        weights = adapter_weights(family, architecture, lora)
        if learner._policy.model.ddp_config.use_distributed_optimizer:
            gather_gradients(learner)
        gradients = {
            name: tensor.clone()
            for name, tensor in whole_tensors(
                learner.model,
                weights,
                architecture,
                lambda parameter: parameter.main_grad,
                dtype=torch.float32,
            )
        }
        return {"before": before, "metrics": metrics, "gradients": gradients, "after": weights_of(learner)}


def bad_gradients(
    *, folder: Path, batch: TrainBatch, megatron: dict[str, Any]
) -> tuple[dict[str, float], bool, str]:
    """Train with a NaN in one gradient of the last rank alone, as often as is allowed and once more.

    Returns metrics of the first step, whether it left all weights alone, and the error.
    """
    with learner_of(folder, megatron, {}) as learner:
        if dist.get_rank() == dist.get_world_size() - 1:
            parameter = next(iter(learner.model.parameters()))
            parameter.register_post_accumulate_grad_hook(spoil)
        before = weights_of(learner)
        metrics = learner.train(batch)
        after = weights_of(learner)
        try:
            for _ in range(4):
                learner.train(batch)
        except TrainerError as error:
            return metrics, all(before[name].equal(after[name]) for name in before), str(error)
    raise AssertionError("no error after four steps with a bad gradient")


def loss_scales(*, folder: Path, batch: TrainBatch, megatron: dict[str, Any]) -> tuple[list[float], bool]:
    """Train three times in float16 with a NaN in the gradient of one rank's expert alone.

    Returns the scale of each optimizer, and whether all weights were left alone.
    """
    with learner_of(folder, megatron, {"fp16": True}) as learner:
        if dist.get_rank() == dist.get_world_size() - 1:
            parameters = dict(learner.model.named_parameters())
            expert = next(p for name, p in parameters.items() if "local_experts" in name)
            expert.register_post_accumulate_grad_hook(spoil)
        before = weights_of(learner)
        for _ in range(3):
            learner.train(batch)
        after = weights_of(learner)
        scales = [float(each.get_loss_scale()) for each in learner._policy.optimizer.chained_optimizers]
        return scales, all(before[name].equal(after[name]) for name in before)


def refusal(*, folder: Path, megatron: dict[str, Any], lora: LoraSection | None = None) -> str:
    """Return the error with which a learner is refused."""
    try:
        with learner_of(folder, megatron, {}, lora):
            return "none"
    except TrainerError as error:
        return str(error)


def actor_critic() -> Algorithm:
    """Return returns less values, a penalty for leaving the reference, and squared errors of values."""
    inner = policy_gradient("values", "ref_log_probs", "old_log_probs")

    def estimator(view: Any) -> tuple[Tensor, Tensor]:
        returns = view.rewards[view.sample_of_token]
        return returns - view.values, returns

    def loss(view: Any, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = inner.loss(view, advantages)
        distance = view.reduce((view.log_probs - view.ref_log_probs).square())
        return value + 0.1 * distance, metrics | {"distance": distance.detach()}

    def value_loss(view: Any, returns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return view.reduce((view.new_values - returns).square()), {"old_value": view.reduce(view.values)}

    return replace(inner, estimator=estimator, loss=loss, value_loss=value_loss)


def learn_with_a_critic(
    *, folder: Path, batch: TrainBatch, megatron: dict[str, Any], save: Path | None, load: Path | None
) -> list[dict[str, float]]:
    """Train three steps with reference and critic; save before the last, or begin with the last; return metrics."""
    settings = LearnerSettings(
        model_path=folder,
        family=FAMILIES[read_config(folder)["model_type"]],
        train=TrainSection(bf16=False, lr=0.05, clip_grad=0.0, max_tokens_per_gpu=40),
        megatron=MegatronSection(**{"optimizer": "sgd"} | megatron),
        seed=1,
        algorithm=actor_critic(),
        roles=RolesSection(ref_update_interval=2),
    )
    learner = Learner(settings)
    try:
        if load is not None:
            learner.load(load)
            return [learner.train(replace(batch, step=3))]
        metrics = [learner.train(replace(batch, step=step)) for step in (1, 2)]
        if save is not None:
            learner.save(save)
        return [*metrics, learner.train(replace(batch, step=3))]
    finally:
        learner.close()


def frozen_log_probs(*, folder: Path, batch: TrainBatch, megatron: dict[str, Any]) -> Columns:
    """Return the columns that a reference and a teacher, of the same weights, give alone."""
    learner = FrozenLearner(
        LearnerSettings(
            model_path=folder,
            family=FAMILIES[read_config(folder)["model_type"]],
            train=TrainSection(bf16=False, max_tokens_per_gpu=40),
            megatron=MegatronSection(**megatron),
            seed=1,
            algorithm=policy_gradient("entropy", "ref_log_probs", "teacher_log_probs"),
            teacher_path=folder,
        )
    )
    try:
        return learner.begin(batch)
    finally:
        learner.close()


def log_probs_of_columns(
    *,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    gradients: Tensor,
    chunk_tokens: int,
    sampling_mask: SamplingMask | None,
) -> tuple[Tensor | None, ...]:
    """Return log-probs, entropies, sums of squared probabilities, and this rank's gradients.

    Each rank is given its rows of the weight alone.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    hidden, weight, targets, gradients = (x.to(device()) for x in (hidden, weight, targets, gradients))
    if sampling_mask is not None:
        sampling_mask = sampling_mask.select(np.arange(len(targets)), device())
    columns = len(weight) // n
    states = hidden.clone().requires_grad_()
    own = weight[rank * columns : (rank + 1) * columns].clone().requires_grad_()
    options = {
        "vocabulary": VocabularyShard(vocab_size, start=rank * columns, group=dist.group.WORLD),
        "temperature": 0.7,
        "chunk_tokens": chunk_tokens,
        "sampling_mask": sampling_mask,
    }
    squares = sum_pi_squared(states, own, **options)
    found, entropy = token_log_probs(states, own, targets, with_entropy=True, **options)
    (found @ gradients[0] + entropy @ gradients[1]).backward()
    return found.detach(), entropy.detach(), squares, states.grad, own.grad
