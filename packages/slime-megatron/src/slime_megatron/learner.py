"""`Learner`: one rank of the trainer. Everything here is synchronous, and runs on one thread."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from slime_core.batch import TrainBatch
from slime_core.config.derive import compute_dtype
from slime_core.correction import Correction
from slime_core.errors import TrainerError
from slime_core.protocols import Metrics, TokenView
from slime_models.architecture import Architecture
from slime_models.checkpoint import HfCheckpoint, read_config
from torch import Tensor

from slime_megatron import checkpoint, world
from slime_megatron.columns import Columns
from slime_megatron.compat import quiet
from slime_megatron.critic import Critic
from slime_megatron.export import hf_buckets
from slime_megatron.freezing import freeze
from slime_megatron.hf_folder import save_adapter, save_model
from slime_megatron.layout import check_model
from slime_megatron.lora import add_adapters, clear_adapters
from slime_megatron.micro_batch import MicroBatch
from slime_megatron.model import build_model, load_weights, response_log_probs
from slime_megatron.mtp import further_loss
from slime_megatron.nuclei import nuclei_of
from slime_megatron.roles import Roles, check_same_model
from slime_megatron.routed import engine_routes
from slime_megatron.router import RECORD, REPLAY, replay
from slime_megatron.saving import Saver
from slime_megatron.sent import SENT, SentPolicies
from slime_megatron.settings import LearnerSettings
from slime_megatron.sharded import global_weights
from slime_megatron.step_metrics import forwarded, mismatch
from slime_megatron.steps import pack_steps
from slime_megatron.trained import Step, TrainedModel, average

_CRITIC = "critic"


class Learner:
    """The policy, its optimizer, the models beside it, and what is done with them. Collective over the world."""

    def __init__(self, settings: LearnerSettings) -> None:
        train, section = settings.train, settings.megatron
        self._settings = settings
        self._needs = settings.algorithm.needs
        self._estimator_state: dict[str, Any] = {}
        architecture = settings.family.architecture(read_config(settings.model_path))
        check_model(section, architecture)
        self._architecture = architecture.with_padded_vocab(section.tensor_model_parallel_size)
        #: With the layers that predict further tokens, where they are trained: engines, critic and roles have none.
        self._held = self._architecture.with_mtp(section.enable_mtp_training)
        self._device = world.device()
        self._dtype: torch.dtype = getattr(torch, compute_dtype(train))
        self._world = world.World(section, seed=settings.seed, rank=settings.rank)
        with contextlib.ExitStack() as on_failure, quiet():
            on_failure.callback(self._world.close)
            self._saver = Saver(self._world)
            if settings.hooks.init is not None:
                settings.hooks.init(settings)
            model = self._build_policy()
            self._roles = Roles(model)
            self._add_roles(model)
            self._sent = SentPolicies(self._roles) if settings.roles.keep_old_actor else None
            self._policy = TrainedModel(
                model,
                train,
                section,
                self._world,
                total_steps=settings.total_steps,
                output_processor=partial(
                    response_log_probs,
                    chunk_tokens=section.log_probs_chunk_size,
                    mtp=getattr(model, "mtp", None),
                ),
                n_further=self._n_further,
            )
            self._critic: Critic | None = None
            if "values" in self._needs:
                self._critic = Critic(
                    settings, self._architecture, self._world, dtype=self._dtype, device=self._device
                )
            on_failure.pop_all()

    @property
    def model(self) -> GPTModel:
        """This rank's part of the policy; gradients of the last optimizer step are in `parameter.main_grad`."""
        return self._policy.model.module

    def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; see `Trainer.train`. Every rank is given the same whole batch."""
        start = time.perf_counter()
        steps = self._pack(batch)
        columns = Columns.of(batch, self._device)
        critic_only = self._critic is not None and batch.step <= self._settings.roles.num_critic_only_steps
        log_probs_start = time.perf_counter()
        columns, before = self._with_old_policy(batch, columns, steps, always=critic_only)
        compared = batch.optimizer_steps[: 1 if before is None else None]
        columns = self._fill(columns, steps)
        log_probs_time = time.perf_counter() - log_probs_start
        with torch.no_grad():
            advantages, returns, credited, correction = self._estimate(columns.whole(batch))
        learned = columns.corrected(batch, correction, self._settings.algorithm)
        metrics: Metrics = {}
        if self._critic is not None:
            metrics |= self._critic.train(steps, learned, returns)
        if not critic_only:
            taken = []
            for number, step in enumerate(steps):
                self._before_train_step(batch.step, number)
                one, trained = self._optimizer_step(step, learned, advantages)
                taken.append(one)
                if number == 0 and before is None:
                    before = self._world.merge(trained)
            metrics |= average(taken, prefix="train/")
        interval = self._settings.roles.ref_update_interval
        if "ref" in self._roles and interval is not None and batch.step % interval == 0:
            self._roles.keep("ref", changing=True)
        work = self._world.add_up(forwarded(steps, self._settings.megatron.context_parallel_size))
        return (
            metrics
            | mismatch(batch, columns, before, compared)
            | {f"train/{name}": float(value) for name, value in credited.items()}
            | {
                "perf/train_tokens": float(len(batch.tokens)),
                "perf/actor_train_time": time.perf_counter() - start - log_probs_time,
                "perf/log_probs_time": log_probs_time,
                "perf/forwarded_tokens": work["tokens"],
                "perf/padding_frac": 1 - work["tokens"] / work["slots"],
            }
        )

    def mark_sent(self, version: str) -> None:
        """Note that the weights as they are go to the engines as `version`."""
        if self._sent is not None:
            self._sent.sent(version)

    def weights(self, dtype: str) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield buckets of weights under their Hugging Face names; see `hf_buckets`."""
        return self._buckets(self._architecture, getattr(torch, dtype))

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Write all state; see `Saver.save`. A critic's is in a folder of its own below."""
        states = [(self._policy_state, folder)]
        if self._critic is not None:
            states.append((self._critic.state, folder / _CRITIC))
        self._saver.save(states, in_background=in_background)

    def written(self, wait: bool) -> bool:
        """Return whether the folder of a save in the background is complete; see `Saver.complete`."""
        return self._saver.complete(wait=wait)

    def load(self, folder: Path) -> None:
        """Restore all state; see `checkpoint.load`."""
        self.written(wait=True)
        if self._critic is not None:
            checkpoint.load(self._critic.state, folder / _CRITIC)
        checkpoint.load(self._policy_state, folder)
        for role in self._roles.changing:  # what the folder's run kept, and this one does not read
            if self._sent is None if role.startswith(SENT) else "ref_log_probs" not in self._needs:
                self._roles.drop(role)

    def save_hf(self, folder: Path, merged: bool = False) -> None:
        """Write a Hugging Face folder, or with LoRA and not `merged` a PEFT adapter folder; see `hf_folder`."""
        settings = self._settings
        if settings.lora.rank is not None and not merged:
            save_adapter(
                folder,
                self.model,
                settings.family,
                self._architecture,
                section=settings.lora,
                base=settings.model_path,
            )
        else:
            save_model(
                folder,
                self._buckets(self._held, self._dtype),
                settings.family,
                self._held,
                config_from=settings.model_path,
            )

    def offload(self) -> None:
        """Move the optimizers' state to the host and free the gradients. Nothing to do on a CPU."""
        self._policy.offload()
        if self._critic is not None:
            self._critic.trained.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        self._policy.onload()
        if self._critic is not None:
            self._critic.trained.onload()

    def close(self) -> None:
        """End the process groups, when nothing is written any more."""
        self._saver.close()
        self._world.close()

    @property
    def _policy_state(self) -> checkpoint.TrainerState:
        p = self._policy
        return checkpoint.TrainerState(
            self._held, p.model, p.optimizer, p.scheduler, self._roles, self._settings.lora,
            self._estimator_state, p.skips,
        )  # fmt: skip

    @property
    def _n_further(self) -> int:
        """Layers that are trained to predict further tokens."""
        return self._held.mtp_num_layers if self._held.holds_mtp else 0

    def _buckets(self, architecture: Architecture, dtype: torch.dtype) -> Iterator[list[tuple[str, Tensor]]]:
        size = self._settings.megatron.update_weight_buffer_size
        return hf_buckets(self.model, self._settings.family, architecture, dtype=dtype, bucket_bytes=size)

    def _build_policy(self) -> GPTModel:
        settings, section = self._settings, self._settings.megatron
        model = build_model(
            self._held,
            section,
            dtype=self._dtype,
            device=self._device,
            provider=settings.hooks.model_provider,
        )
        load_weights(model, self._weights_of(settings.model_path, self._held), settings.family, self._held)
        if settings.lora.rank is not None:
            names = global_weights(model, self._architecture)
            add_adapters(model, names, settings.lora, seed=settings.seed)
        freeze(
            model,
            global_weights(model, self._held),
            settings.family.parameter_names(self._held),
            only_train=section.only_train_params_name_list,
            frozen=section.freeze_params_name_list,
        )
        return model

    def _add_roles(self, model: GPTModel) -> None:
        """Give the policy's model a reference and a teacher, where estimator or loss read them."""
        settings = self._settings
        if "ref_log_probs" in self._needs:
            if settings.ref_path is None:
                self._roles.keep("ref", changing=False)
            else:
                self._load_role("ref", settings.ref_path, model)
        if "teacher_log_probs" in self._needs and settings.teacher_path is not None:
            self._load_role("teacher", settings.teacher_path, model)

    def _load_role(self, role: str, folder: Path, model: GPTModel) -> None:
        family, architecture = self._settings.family, self._architecture
        check_same_model(folder, family, architecture, role=role)

        def write() -> None:
            load_weights(model, self._weights_of(folder, architecture), family, architecture)
            clear_adapters(model)

        self._roles.load(role, write)

    def _weights_of(self, folder: Path, architecture: Architecture) -> HfCheckpoint:
        """Return the weights of a folder, found to be what its config.json describes."""
        weights = HfCheckpoint(folder)
        self._settings.family.check_weights(weights, architecture)
        return weights

    def _pack(self, batch: TrainBatch) -> list[Step]:
        """Return the micro-batches of this data-parallel rank, for each optimizer step."""
        settings, replays = self._settings, self._settings.megatron.use_rollout_routing_replay
        return pack_steps(
            batch,
            self._held,
            settings.megatron,
            self._world,
            max_tokens_per_gpu=settings.train.max_tokens_per_gpu,
            needs=self._needs,
            routes=engine_routes(batch, self._architecture) if replays else None,
            nuclei=nuclei_of(batch) if settings.restricted else None,
            dtype=self._dtype,
            device=self._device,
        )

    def _with_old_policy(
        self, batch: TrainBatch, columns: Columns, steps: Sequence[Step], *, always: bool
    ) -> tuple[Columns, Tensor | None]:
        """Return (the columns with what the old policy says, its log-probs to hold against the engine's).

        Either lacks log-probs where they are not needed.

        Args:
            batch: the samples.
            columns: theirs.
            steps: their micro-batches.
            always: take them in any case.
        """
        from_engine, squares = self._settings.train.use_rollout_logprobs, "sum_pi_squared" in self._needs
        if from_engine and columns.rollout_log_probs is None:
            raise TrainerError(
                "use_rollout_logprobs: the batch has no rollout_log_probs; use an engine that returns them"
            )
        routes = len(steps) > 1 and self._settings.megatron.use_routing_replay
        if from_engine and not squares and not routes:
            return replace(columns, old_log_probs=columns.rollout_log_probs), None
        if self._sent is not None:
            found = self._sent.log_probs(batch, partial(self._forward, columns, steps, "old_actor"))
        elif len(steps) > 1 or squares or "old_log_probs" in self._needs or always:
            found = self._forward(columns, steps, "actor")
        else:
            return columns, None
        old = columns.rollout_log_probs if from_engine else found[0]
        return replace(columns, old_log_probs=old, sum_pi_squared=found[1] if squares else None), found[0]

    def _fill(self, columns: Columns, steps: Sequence[Step]) -> Columns:
        """Return the columns with what reference, teacher and critic say."""
        filled: dict[str, Tensor] = {}
        for role in ("ref", "teacher"):
            if role in self._roles:
                with self._roles.playing(role):
                    filled[f"{role}_log_probs"] = self._forward(columns, steps, role)[0]
        if self._critic is not None:
            filled["values"] = self._critic.values(steps, columns.weights)
        return replace(columns, **filled)

    def _forward(self, columns: Columns, steps: Sequence[Step], role: str) -> Tensor:
        """Return log-probs, and sums of squared probabilities if the estimator reads them, [1 or 2, T].

        Without gradient, under the weights that are in the model: those of `role`.
        """
        if self._settings.hooks.before_log_prob is not None:
            self._settings.hooks.before_log_prob(self.model, role)
        rows = [0, -1] if "sum_pi_squared" in self._needs else [0]
        with replay(self._policy.routers, self._replay_before(role)):
            return self._policy.forward(
                steps, columns.weights.expand(len(rows), -1), lambda output: output[rows]
            )

    def _replay_before(self, role: str) -> RouterReplayAction | None:
        """Return what routers do in a pass for log-probs; see `replay`."""
        section = self._settings.megatron
        if section.use_rollout_routing_replay and role in ("actor", "old_actor"):
            return REPLAY
        return RECORD if section.use_routing_replay and role == "actor" else None

    def _estimate(self, view: TokenView) -> tuple[Tensor, Tensor, Mapping[str, Any], Correction]:
        """Return (advantages, returns, metrics, correction) of the whole batch, and keep the estimator's state."""
        estimator: Any = self._settings.algorithm.estimator
        remembers = "state" in inspect.signature(estimator).parameters
        given = {"state": dict(self._estimator_state)} if remembers else {}
        advantages, returns, *more = estimator(view, **given)
        metrics, state, correction = (*more, *({}, {}, Correction())[len(more) :])
        self._estimator_state.clear()
        self._estimator_state.update(state)
        return advantages, returns, metrics, correction

    def _before_train_step(self, step: int, number: int) -> None:
        if self._settings.hooks.before_train_step is not None:
            p = self._policy
            self._settings.hooks.before_train_step(step, number, self.model, p.optimizer, p.scheduler)

    def _optimizer_step(self, step: Step, columns: Columns, advantages: Tensor) -> tuple[Metrics, Tensor]:
        """Take one optimizer step. Returns its metrics, and the log-probs [T] before it that this rank computed."""
        trained, n_further = torch.full_like(columns.weights, math.nan), self._n_further

        def loss(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
            trained[micro.columns] = output[0].detach()
            own, further = output[: len(output) - n_further], output[len(output) - n_further :]
            view = columns.view(micro, *own)
            value, metrics = self._settings.algorithm.loss(view, advantages[micro.columns])
            if not n_further:
                return value, metrics
            further_value, further_metrics = further_loss(further, view.weights)
            scaled = self._settings.megatron.mtp_loss_scaling_factor * further_value
            return value + scaled, {"loss": value.detach()} | metrics | further_metrics

        # With one optimizer step there may be no pass before it, whose routes would be those of the step itself.
        routed = step[0].packed.routed
        with replay(self._policy.routers, REPLAY if routed is not None and routed.routes else None):
            return self._policy.take_step(step, loss), trained
