"""`Learner`: one rank of the trainer. Everything here is synchronous and runs on one thread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from slime_core.errors import TrainerError
from slime_core.protocols import Columns, Metrics
from slime_core.runtime.phase_times import PhaseTimes
from slime_core.samples import TrainBatch
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatch, MicroBatches
from slime_megatron.batch.sampling_mask import sampling_mask_of
from slime_megatron.batch.token_columns import TokenColumns
from slime_megatron.checkpoint import state
from slime_megatron.checkpoint.writer import CheckpointWriter
from slime_megatron.hf.export import hf_buckets, stage_sender
from slime_megatron.hf.save_folder import save_adapter, save_model
from slime_megatron.importing import quiet
from slime_megatron.learner.architecture import padded_architecture, placement
from slime_megatron.learner.behaviour_policies import ROLE_PREFIX, BehaviourPolicies
from slime_megatron.learner.critic import CRITIC, Critic
from slime_megatron.learner.estimator import StatefulEstimator
from slime_megatron.learner.metrics import mismatch, sample_means, work
from slime_megatron.learner.policy_model import (
    add_roles,
    build_policy,
    check_reference,
    layers_are_trained_alike,
    same_start,
)
from slime_megatron.learner.postprocess import postprocess
from slime_megatron.learner.step import BegunStep, CreditedStep, pack
from slime_megatron.model.family_layers import layers_of
from slime_megatron.model.gpt import Predicted, response_log_probs
from slime_megatron.model.layers.router import RECORD, REPLAY, replay
from slime_megatron.model.mtp import mtp_loss
from slime_megatron.optim.train_step import TrainedModel, average
from slime_megatron.optim.weight_sets import WeightSets
from slime_megatron.parallel import process_groups
from slime_megatron.settings.learner_settings import LearnerSettings


class Learner:
    """The policy, its optimizer and the models beside it. Methods are collective over the world."""

    def __init__(self, settings: LearnerSettings) -> None:
        train, section = settings.train, settings.megatron
        self._settings = settings
        self._needs = settings.algorithm.needs
        self._estimator = StatefulEstimator(settings.algorithm.estimator)
        self._architecture = padded_architecture(settings)
        self._layers = layers_of(settings.family, self._architecture)
        #: With MTP layers, where they are trained: engines, critic, reference and teacher have none.
        self._held = self._architecture.with_mtp(section.enable_mtp_training)
        self._on = placement(settings)
        self.times = PhaseTimes(settings.rank.number)
        """What the last `train` did and when, on this rank."""
        self._world = process_groups.World(section, seed=settings.seed, rank=settings.rank)
        with contextlib.ExitStack() as on_failure, quiet():
            on_failure.callback(self._world.close)
            self._checkpoint_writer = CheckpointWriter(self._world)
            if settings.hooks.init is not None:
                settings.hooks.init(settings)
            model = build_policy(settings, self._held, layers=self._layers, **self._on)
            self._weight_sets = WeightSets(model)
            if "ref" not in settings.apart:
                add_roles(self._weight_sets, model, settings, self._architecture)
            self._behaviour_policies = (
                BehaviourPolicies(self._weight_sets) if settings.roles.keep_old_actor else None
            )
            self._policy = TrainedModel(
                model,
                train,
                section,
                self._world,
                times=self.times,
                total_steps=settings.total_steps,
                output_processor=partial(
                    response_log_probs,
                    chunk_tokens=section.log_probs_chunk_size,
                    mtp=getattr(model, "mtp", None),
                ),
                n_mtp_layers=self._n_mtp_layers,
            )
            self._critic: Critic | None = None
            if "values" in self._needs and "critic" not in settings.apart:
                self._critic = Critic(settings, self._architecture, self._world, times=self.times, **self._on)
            self._step: BegunStep | CreditedStep | None = None  # between calls
            on_failure.pop_all()

    @property
    def model(self) -> GPTModel:
        """This rank's part of the policy; gradients of the last optimizer step are in `parameter.main_grad`."""
        return self._policy.model.module

    def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; see `Trainer.train`. Every rank is given the same whole batch."""
        return self._learn(self._credit(self._begin(batch), {}))

    def begin(self, batch: TrainBatch) -> Columns:
        """Do what of `train` needs nothing of roles that are elsewhere; see `PooledTrainer`."""
        self._step = self._begin(batch)
        return {}

    def credit(self, columns: Columns) -> Columns:
        """Credit the tokens of the step that has begun; see `PooledTrainer`."""
        if not isinstance(self._step, BegunStep):
            raise TrainerError("credit: no step has begun; call begin() first")
        self._step = self._credit(self._step, columns)
        return self._step.for_the_critic()

    def learn(self, columns: Columns) -> Metrics:
        """Run the optimizer steps of the step that is credited, whose columns are here; see `PooledTrainer`."""
        step, self._step = self._step, None
        if not isinstance(step, CreditedStep):
            raise TrainerError("learn: no step is credited; call begin() and credit() first")
        return self._learn(step)

    def _begin(self, batch: TrainBatch) -> BegunStep:
        self.times.restart()
        restricted = sampling_mask_of(batch) if self._settings.restricted else None
        steps = pack(
            batch,
            self._settings,
            self._held,
            self._world,
            needs=self._needs,
            sampling_mask=restricted,
            **self._on,
        )
        columns = TokenColumns.of(batch, self._on["device"], needs=self._needs)
        critic_only = "values" in self._needs and batch.step <= self._settings.roles.num_critic_only_steps
        with self.times.timed("log_probs"):
            columns, before = self._with_old_policy(batch, columns, steps, always=critic_only)
            columns = self._fill(columns, steps)
        return BegunStep(batch, steps, columns, before, critic_only, self.times.elapsed_s())

    def _credit(self, begun: BegunStep, given: Columns) -> CreditedStep:
        waited_s = self.times.elapsed_s() - begun.seconds
        batch = begun.batch
        columns = begun.columns.having(given)
        with torch.no_grad():
            advantages, returns, credited, correction = self._estimator(columns.whole(batch))
        learned = columns.corrected(batch, correction, self._settings.algorithm)
        if (function := self._settings.hooks.rollout_data) is not None:
            learned, advantages, returns = postprocess(
                function, self._settings, batch, learned, advantages, returns
            )
        metrics = {f"train/{name}": float(value) for name, value in credited.items()}
        return CreditedStep(begun, learned, advantages, returns, metrics, waited_s)

    def _learn(self, credited: CreditedStep) -> Metrics:
        begun, learned = credited.begun, credited.columns
        batch, steps, before = begun.batch, begun.steps, begun.log_probs
        compared = batch.optimizer_steps[: 1 if before is None else None]
        metrics: Metrics = {}
        if self._critic is not None:
            with self.times.timed("critic"):
                metrics |= self._critic.train(steps, learned, credited.returns)
        if not begun.critic_only:
            taken = []
            for number, step in enumerate(steps):
                self._before_train_step(batch.step, number)
                with self.times.timed("optimizer_step"):
                    one, trained = self._optimizer_step(step, learned, credited.advantages)
                taken.append(one)
                if number == 0 and before is None:
                    before = self._world.gather_columns(trained)
            metrics |= average(taken, prefix="train/")
        interval = self._settings.roles.ref_update_interval
        if "ref" in self._weight_sets and interval is not None and batch.step % interval == 0:
            with self.times.timed("ref_model_update"):
                self._weight_sets.snapshot("ref", checkpointed=True)
        log_probs = before if learned.old_log_probs is None else learned.old_log_probs
        means = {"advantages": credited.advantages, "returns": credited.returns}
        by_own_weights, waited_s = self._behaviour_policies is not None, credited.waited_s
        return (
            metrics
            | mismatch(batch, begun.columns, before, compared, by_own_weights=by_own_weights)
            | credited.metrics
            | sample_means(batch, learned, log_probs, means)
            | work(batch, steps, self.times, self._world, waited_s=waited_s)
            | ({"perf/pools_wait_time": waited_s} if self._settings.apart else {})
        )

    def mark_sent(self, version: str) -> None:
        """Note that the weights as they are now are sent to the engines as `version`."""
        if self._behaviour_policies is not None:
            self._behaviour_policies.record(version)

    def weights(self, dtype: str, *, stage_alone: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield buckets of weights under their Hugging Face names; see `hf_buckets`."""
        return self._buckets(self._architecture, getattr(torch, dtype), stage_alone=stage_alone)

    def stage_sender(self) -> int | None:
        """Return which of the senders of stages this rank is; None where it is none."""
        return stage_sender()

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Write all state; see `CheckpointWriter.save`. A critic's is in a folder of its own below."""
        states = [(self._policy_state, folder)]
        if self._critic is not None:
            states.append((self._critic.state, folder / CRITIC))
        self._checkpoint_writer.save(states, in_background=in_background)

    def written(self, wait: bool) -> bool:
        """Return whether the folder of a save in the background is complete; see `CheckpointWriter.complete`."""
        return self._checkpoint_writer.complete(wait=wait)

    def load(self, folder: Path) -> None:
        """Restore all state; see `state.load`, and `policy_model` for what a checkpoint's run must have started from."""
        self.written(wait=True)
        if "ref_log_probs" in self._needs:
            check_reference(folder, self._settings)
        if self._critic is not None:
            state.load(self._critic.state, folder / CRITIC)
        with same_start(folder, self.model, self._settings):
            state.load(self._policy_state, folder)
        # Those of the run that saved may be roles that this one does not read.
        has_ref = "ref_log_probs" in self._needs and "ref" not in self._settings.apart
        for role in self._weight_sets.checkpointed:
            is_old_policy = role.startswith(ROLE_PREFIX)
            if self._behaviour_policies is None if is_old_policy else not has_ref:
                self._weight_sets.drop(role)

    def save_hf(self, folder: Path, merged: bool = False) -> None:
        """Write a Hugging Face folder, or with LoRA and not `merged` a PEFT adapter folder; see `hf.save_folder`."""
        settings = self._settings
        if settings.lora.rank is not None and not merged:
            save_adapter(
                folder,
                self.model,
                settings.family,
                self._architecture,
                section=settings.lora,
                base=settings.hf_path,
            )
        else:
            save_model(
                folder,
                self._buckets(self._held, self._on["dtype"]),
                settings.family,
                self._held,
                config_from=settings.model_path,
                passed_on_from=settings.hf_path,
            )

    def offload(self) -> None:
        """Move the optimizers' state to the host and free the gradients. Nothing to do on a CPU."""
        self._policy.offload()
        if self._critic is not None:
            self._critic.trained.offload()

    def offload_weights(self) -> None:
        """Move the weights to the host. Nothing to do on a CPU."""
        self._policy.offload_weights()
        if self._critic is not None:
            self._critic.trained.offload_weights()

    def onload_weights(self) -> None:
        """Move the policy's weights back; a critic's are not sent."""
        self._policy.onload_weights()

    def onload(self) -> None:
        """Undo `offload` and `offload_weights`."""
        self._policy.onload()
        if self._critic is not None:
            self._critic.trained.onload()

    def close(self) -> None:
        """End the process groups, when nothing is written any more."""
        self._checkpoint_writer.close()
        self._world.close()

    @property
    def _policy_state(self) -> state.TrainerState:
        p = self._policy
        return state.TrainerState(
            self._held, p.model, p.optimizer, p.scheduler, self._weight_sets, self._settings.lora,
            self._estimator.state, p.skipped_steps, layers_are_trained_alike(self._settings, self._held),
        )  # fmt: skip

    @property
    def _n_mtp_layers(self) -> int:
        """Number of MTP layers that are trained."""
        return self._held.mtp_num_layers if self._held.holds_mtp else 0

    def _buckets(
        self, architecture: Architecture, dtype: torch.dtype, *, stage_alone: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        size, family = self._settings.megatron.update_weight_buffer_size, self._settings.family
        return hf_buckets(
            self.model, family, architecture, dtype=dtype, bucket_bytes=size, stage_alone=stage_alone
        )

    def _with_old_policy(
        self, batch: TrainBatch, columns: TokenColumns, steps: Sequence[MicroBatches], *, always: bool
    ) -> tuple[TokenColumns, Tensor | None]:
        """Return (the columns with the old policy's log-probs, the log-probs that are compared with the engine's).

        Either lacks log-probs where they are not needed.

        Args:
            batch: the samples.
            columns: theirs.
            steps: their micro-batches.
            always: compute them in any case.
        """
        from_engine, squares = self._settings.train.use_rollout_logprobs, "sum_pi_squared" in self._needs
        if from_engine and columns.rollout_log_probs is None:
            raise TrainerError(
                "use_rollout_logprobs: the batch has no rollout_log_probs; use an engine that returns them"
            )
        routes = len(steps) > 1 and self._settings.megatron.use_routing_replay
        if from_engine and not squares and not routes:
            return replace(columns, old_log_probs=columns.rollout_log_probs), None
        if self._behaviour_policies is not None:
            found = self._behaviour_policies.log_probs(
                batch, partial(self._forward, columns, steps, "old_actor")
            )
        elif len(steps) > 1 or squares or "old_log_probs" in self._needs or always:
            found = self._forward(columns, steps, "actor")
        else:
            return columns, None
        old = columns.rollout_log_probs if from_engine else found[0]
        return replace(columns, old_log_probs=old, sum_pi_squared=found[1] if squares else None), found[0]

    def _fill(self, columns: TokenColumns, steps: Sequence[MicroBatches]) -> TokenColumns:
        """Return the columns with the log-probs of reference and teacher and the values of the critic."""
        filled: dict[str, Any] = {}
        for role in ("ref", "teacher"):
            if role in self._weight_sets:
                with self.times.timed(f"{role}_log_probs"), self._weight_sets.swapped_in(role):
                    filled[f"{role}_log_probs"] = self._forward(columns, steps, role)[0]
        if self._critic is not None:
            filled["values"] = self._critic.values(steps, columns.weights)
        return replace(columns, **filled)

    def _forward(self, columns: TokenColumns, steps: Sequence[MicroBatches], role: str) -> Tensor:
        """Return log-probs, and sums of squared probabilities if the estimator reads them, [1 or 2, T].

        Without gradient, under the weights that are in the model: those of `role`.
        """
        if self._settings.hooks.before_log_prob is not None:
            self._settings.hooks.before_log_prob(self.model, role)
        rows = [0, -1] if "sum_pi_squared" in self._needs else [0]
        with replay(self._policy.routers, self._replay_before(role)):
            return self._policy.forward(
                steps, columns.weights.expand(len(rows), -1), lambda output: output.numbers[rows]
            )

    def _replay_before(self, role: str) -> RouterReplayAction | None:
        """Return what routers do in a pass for log-probs; see `replay`."""
        section = self._settings.megatron
        if section.use_rollout_routing_replay and role in ("actor", "old_actor"):
            return REPLAY
        return RECORD if section.use_routing_replay and role == "actor" else None

    def _before_train_step(self, step: int, number: int) -> None:
        if self._settings.hooks.before_train_step is not None:
            p = self._policy
            self._settings.hooks.before_train_step(step, number, self.model, p.optimizer, p.scheduler)

    def _optimizer_step(
        self, step: MicroBatches, columns: TokenColumns, advantages: Tensor
    ) -> tuple[Metrics, Tensor]:
        """Take one optimizer step. Returns its metrics, and the log-probs [T] before it that this rank computed."""
        trained, n_mtp_layers = torch.full_like(columns.weights, math.nan), self._n_mtp_layers

        def loss(micro: MicroBatch, output: Predicted) -> tuple[Tensor, Mapping[str, Any]]:
            trained[micro.columns] = output.numbers[0].detach()
            own, of_mtp = output.numbers.split([len(output.numbers) - n_mtp_layers, n_mtp_layers])
            view = columns.view(micro, *own, logits=output.logits)
            value, metrics = self._settings.algorithm.loss(view, advantages[micro.columns])
            if not n_mtp_layers:
                return value, metrics
            mtp_value, mtp_metrics = mtp_loss(of_mtp, view.weights)
            scaled = self._settings.megatron.mtp_loss_scaling_factor * mtp_value
            return value + scaled, {"loss": value.detach(), **metrics, **mtp_metrics}

        # With one optimizer step there may be no pass before it, whose routes would be those of the step itself.
        routed = step[0].packed.routed
        with replay(self._policy.routers, REPLAY if routed is not None and routed.routes else None):
            return self._policy.take_step(step, loss), trained
