"""Learners of each rank, and what tests read of them: gradients, moments and weights of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from algorithms import policy_gradient
from megatron.core import parallel_state
from slime_core.config.sections import TrainSection
from slime_core.run.assemble import Algorithm
from slime_megatron.hf.shard import whole_tensors
from slime_megatron.learner.learner import Learner
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection
from slime_models.hf.config import read_config
from tiny_models import FAMILIES
from torch import Tensor


@contextmanager
def learner_of(
    folder: Path,
    megatron: dict[str, Any],
    train: dict[str, Any],
    lora: LoraSection | None = None,
    algorithm: Algorithm | None = None,
) -> Iterator[Learner]:
    """Yield a learner on the model of `folder`, and end it."""
    settings = LearnerSettings(
        model_path=folder,
        family=FAMILIES[read_config(folder)["model_type"]],
        train=TrainSection(**{"bf16": False, "lr": 0.05, "clip_grad": 0.0} | train),
        megatron=MegatronSection(**{"optimizer": "sgd"} | megatron),
        seed=1,
        algorithm=algorithm or with_entropy_bonus(),
        lora=lora or LoraSection(),
    )
    learner = Learner(settings)
    try:
        yield learner
    finally:
        learner.close()


def with_entropy_bonus() -> Algorithm:
    """Return the policy gradient of the other tests with a tenth of the entropy added to the objective."""
    inner = policy_gradient("entropy")

    def loss(view: Any, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = inner.loss(view, advantages)
        entropy = view.reduce(view.entropy)
        return value - 0.1 * entropy, metrics | {"entropy": entropy.detach()}

    return replace(inner, loss=loss)


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    """Return Hugging Face name -> gradient of the last optimizer step. Collective."""
    if learner._policy.model.ddp_config.use_distributed_optimizer:
        gather_gradients(learner)
    return whole(learner, lambda parameter: parameter.main_grad)


def gather_gradients(learner: Learner) -> None:
    """Give every rank whole gradients: with a distributed optimizer each has summed up its share alone. Collective."""
    for buffer in (*learner._policy.model.buffers, *learner._policy.model.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def whole(learner: Learner, read: Any) -> dict[str, Tensor]:
    """Return Hugging Face name -> what `read` returns of a parameter, of the whole model. Collective."""
    family, architecture = learner._settings.family, learner._held
    parameters = family.parameter_names(architecture)
    weights = {name: family.weight(name, architecture) for name in parameters}
    tensors = whole_tensors(learner.model, weights, architecture, read, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in family.hf_tensors(tensors, architecture)}


def moments_of(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """Return AdamW's two moments by Hugging Face name; not of a distributed optimizer, whose state is in shares."""
    optimizers = getattr(learner._policy.optimizer, "chained_optimizers", [learner._policy.optimizer])
    state = {parameter: values for each in optimizers for parameter, values in each.optimizer.state.items()}
    return {
        kind: whole(learner, lambda parameter, kind=kind: state[parameter][kind])
        for kind in ("exp_avg", "exp_avg_sq")
    }


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """Return Hugging Face name -> weight, also of layers that are not sent. Collective."""
    buckets = learner._buckets(learner._held, torch.float32)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def check_stages(learner: Learner, dtype: str, weights: dict[str, Tensor]) -> None:
    """Check that pipeline stages alone yield each weight once, all ranks of a stage the same, and that one rank of each sends."""
    own = {
        name: tensor.clone() for bucket in learner.weights(dtype, stage_alone=True) for name, tensor in bucket
    }
    assert all(tensor.equal(weights[name]) for name, tensor in own.items())
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    said: list[Any] = [None] * dist.get_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    dist.all_gather_object(said, (stage, learner.stage_sender(), list(own)))
    of_stage = {stage: names for stage, _, names in said}
    assert all(of_stage[stage] == names for stage, _, names in said)
    assert sorted(name for names in of_stage.values() for name in names) == sorted(weights)
    senders = [(stage, sender) for stage, sender, _ in said if sender is not None]
    assert senders == [(number, number) for number in range(stages)]
    assert said[0][1] == 0  # as launchers have it
