"""`Critic`: the value model of PPO, with weights, optimizer and schedule of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_core.config.sections import TrainSection
from slime_core.protocols import Metrics
from slime_core.runtime.phase_times import PhaseTimes
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatch, MicroBatches
from slime_megatron.batch.response_tokens import ResponseTokens
from slime_megatron.batch.token_columns import TokenColumns
from slime_megatron.checkpoint.state import TrainerState
from slime_megatron.checkpoint.stored_as_hf import HF_HEAD, weights_of
from slime_megatron.checkpoint.torch_dist import HEAD
from slime_megatron.hf.load_weights import load_weights
from slime_megatron.model.family_layers import layers_of
from slime_megatron.model.gpt import build_model, gather_response_tokens, response_rows
from slime_megatron.optim.train_step import TrainedModel, average
from slime_megatron.optim.weight_sets import check_same_model
from slime_megatron.parallel.process_groups import World
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.section_roles import RolesSection

#: Folder of the critic below a checkpoint's.
CRITIC = "critic"


class ValueHead(MegatronModule):
    """In the place of the output layer: one number a token, float32. Every tensor-parallel rank holds all of it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [R] of hidden states [R, hidden_size]."""
        return (hidden.float() @ self.weight.float().t()).squeeze(1)


class Critic:
    """Predicts, before each response token, the return from there on. Methods are collective over the world.

    Its trunk begins as the folder `critic_path`, its head as that folder's `score.weight` [1, hidden_size], or as
    zero: values then begin at 0. Without that folder it begins as the initial policy does.

    Raises:
        CheckpointError: the folder's weights are of another architecture than the policy's; names the field.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        architecture: Architecture,
        world: World,
        *,
        times: PhaseTimes,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        folder = settings.critic_path or settings.first_path
        check_same_model(folder, settings.family, architecture, role="critic")
        untied = dataclasses.replace(
            architecture, tie_word_embeddings=False
        )  # the head takes its output layer's place
        model = build_model(
            untied,
            settings.megatron,
            dtype=dtype,
            device="cpu",
            layers=layers_of(settings.family, untied),
            provider=settings.hooks.model_provider,
        )
        if model.post_process:
            model.output_layer = ValueHead(model.config)
        hf = weights_of(folder, settings.family, architecture)
        unread = settings.family.weight(HEAD, untied).hf
        load_weights(model, _Trunk(hf, unread), settings.family, untied, skip={HEAD})
        if model.post_process and HF_HEAD in hf:
            with torch.no_grad():
                model.output_layer.weight.copy_(hf[HF_HEAD])
        self.trained = TrainedModel(
            model.to(device),
            critic_train_section(settings.train, settings.roles),
            settings.megatron,
            world,
            times=times,
            total_steps=settings.critic_total_steps,
            output_processor=response_values,
        )
        self._loss = settings.algorithm.value_loss
        self._architecture = architecture

    @property
    def state(self) -> TrainerState:
        """What a checkpoint holds of it."""
        c = self.trained
        return TrainerState(
            self._architecture, c.model, c.optimizer, c.scheduler, skipped_steps=c.skipped_steps
        )

    def values(self, steps: Sequence[MicroBatches], like: Tensor) -> Tensor:
        """Return the value [T] of the state before each response token, without gradient."""
        return self.trained.forward(steps, like, lambda values: values)

    def train(self, steps: Sequence[MicroBatches], columns: TokenColumns, returns: Tensor) -> Metrics:
        """Take the optimizer steps of a batch; returns `train/critic/*` metrics.

        Args:
            steps: the micro-batches of each optimizer step.
            columns: of the batch, `values` among them.
            returns: [T], what the values are to become.
        """

        def loss(micro: MicroBatch, values: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
            assert self._loss is not None  # an algorithm that needs values has one
            view = dataclasses.replace(columns.view(micro), new_values=values)
            return self._loss(view, returns[micro.columns])

        return average([self.trained.take_step(step, loss) for step in steps], prefix="train/critic/")


def response_values(
    *,
    hidden_states: Tensor,
    output_layer: ValueHead,
    context: ResponseTokens,
    config: TransformerConfig,
    **_: Any,
) -> Tensor:
    """Return values [R]: the `output_processor` of a critic."""
    return gather_response_tokens(output_layer(response_rows(hidden_states, context, config)), context)


def critic_train_section(train: TrainSection, roles: RolesSection) -> TrainSection:
    """Return the settings of the critic's optimizer: the policy's, with a learning rate and warm-up of its own."""
    lr = train.lr if roles.critic_lr is None else roles.critic_lr
    own = {"lr": lr, "min_lr": min(train.min_lr, lr), "lr_warmup_iters": roles.critic_lr_warmup_iters}
    return train.model_copy(update=own)


class _Trunk(Mapping[str, Tensor]):
    """A folder's weights without a classifier's head, and as if it had an output layer, which nobody reads."""

    def __init__(self, hf: Mapping[str, Tensor], unread: Collection[str]) -> None:
        self._hf = hf
        self._names = (set(hf) - {HF_HEAD}) | set(unread)

    def __getitem__(self, name: str) -> Tensor:
        return self._hf[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
