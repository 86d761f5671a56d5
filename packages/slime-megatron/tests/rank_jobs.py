"""What tests ask of each rank. Every job builds a `Learner`, and returns what a test compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import FAMILIES, policy_gradient
from slime_core.batch import TrainBatch
from slime_core.config.sections import TrainSection
from slime_megatron.learner import Learner
from slime_megatron.section import MegatronSection
from slime_megatron.settings import LearnerSettings
from slime_megatron.sharded import whole_tensors
from slime_models.checkpoint import read_config
from torch import Tensor


@contextmanager
def learner_of(folder: Path, megatron: dict[str, Any], train: dict[str, Any]) -> Iterator[Learner]:
    """Yield a learner on the model of `folder`, and end it."""
    settings = LearnerSettings(
        model_path=folder,
        family=FAMILIES[read_config(folder)["model_type"]],
        train=TrainSection(**{"bf16": False, "lr": 0.05, "clip_grad": 0.0} | train),
        megatron=MegatronSection(**{"optimizer": "sgd"} | megatron),
        seed=1,
        algorithm=policy_gradient(),
    )
    learner = Learner(settings)
    try:
        yield learner
    finally:
        learner.close()


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    """Return Hugging Face name -> gradient of the last optimizer step. Collective."""
    buffers = [*learner._model.buffers, *learner._model.expert_parallel_buffers]
    for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
        group = bucket.data_parallel_group if hasattr(bucket, "data_parallel_group") else None
        if group is not None and learner._settings.megatron.use_distributed_optimizer:
            own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    return whole(learner, lambda parameter: parameter.main_grad)


def whole(learner: Learner, read: Any) -> dict[str, Tensor]:
    """Return Hugging Face name -> what `read` returns of a parameter, of the whole model. Collective."""
    family, architecture = learner._settings.family, learner._architecture
    tensors = whole_tensors(learner.model, family, architecture, read, dtype=torch.float32)
    return {
        hf_name: part.clone()
        for name, tensor in tensors
        for hf_name, part in family.to_hf(name, tensor, architecture)
    }


def train(
    folder: Path, batch: TrainBatch, megatron: dict[str, Any], train: dict[str, Any], n_steps: int
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Train `n_steps` times on a batch; return first metrics, first gradients, last weights. Rank 0 returns tensors."""
    with learner_of(folder, megatron, train) as learner:
        metrics = learner.train(batch)
        gradients = gradients_of(learner)
        for _ in range(n_steps - 1):
            learner.train(batch)
        weights = {name: tensor.clone() for bucket in learner.weights("float32") for name, tensor in bucket}
    return (metrics, gradients, weights) if dist.get_rank() == 0 else (metrics, {}, {})
