"""`Learner`: one rank of the trainer. Everything here is synchronous, and runs on one thread."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from slime_core.batch import TrainBatch
from slime_core.errors import TrainerError
from slime_core.protocols import Metrics
from slime_models.checkpoint import HfCheckpoint, read_config
from torch import Tensor

from slime_megatron import checkpoint, world
from slime_megatron.columns import Columns
from slime_megatron.compat import quiet
from slime_megatron.critic import Critic
from slime_megatron.export import hf_buckets
from slime_megatron.flops import forward_flops
from slime_megatron.freezing import freeze
from slime_megatron.hf_folder import save_adapter, save_model
from slime_megatron.layout import check_model
from slime_megatron.lora import add_adapters, clear_adapters
from slime_megatron.micro_batch import MicroBatch, make_micro_batch
from slime_megatron.model import build_model, load_weights, response_log_probs
from slime_megatron.roles import Roles, check_same_model
from slime_megatron.rotary import rotary_tables
from slime_megatron.schedule import rank_schedule
from slime_megatron.sent import SENT, SentPolicies
from slime_megatron.settings import LearnerSettings
from slime_megatron.sharded import global_parameters
from slime_megatron.trained import Step, TrainedModel, average

_CRITIC = "critic"


class Learner:
    """The policy, its optimizer, the models beside it, and what is done with them. Collective over the world."""

    def __init__(self, settings: LearnerSettings) -> None:
        train, section = settings.train, settings.megatron
        self._settings = settings
        self._needs = settings.algorithm.needs
        architecture = settings.family.architecture(read_config(settings.model_path))
        check_model(section, architecture)
        self._architecture = architecture.with_padded_vocab(section.tensor_model_parallel_size)
        self._device = world.device()
        self._dtype = torch.bfloat16 if train.bf16 else torch.float32
        self._world = world.World(section, seed=settings.seed)
        with contextlib.ExitStack() as on_failure, quiet():
            on_failure.callback(self._world.close)
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
                output_processor=partial(response_log_probs, chunk_tokens=section.log_probs_chunk_size),
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
        critic_only = self._critic is not None and batch.step < self._settings.roles.num_critic_only_steps
        log_probs_start = time.perf_counter()
        old, before = self._old_log_probs(batch, columns, steps, always=critic_only)
        columns = self._fill(replace(columns, old_log_probs=old), steps)
        log_probs_time = time.perf_counter() - log_probs_start
        with torch.no_grad():
            advantages, returns, *credited = self._settings.algorithm.estimator(columns.whole(batch))
        metrics: Metrics = {}
        if self._critic is not None:
            metrics |= self._critic.train(steps, columns, returns)
        if not critic_only:
            taken = []
            for number, step in enumerate(steps):
                self._before_train_step(batch.step, number)
                one, trained = self._optimizer_step(step, columns, advantages)
                taken.append(one)
                if number == 0 and before is None:
                    before = self._world.merge(trained)
            metrics |= average(taken, prefix="train/")
        interval = self._settings.roles.ref_update_interval
        if "ref" in self._roles and interval is not None and (batch.step + 1) % interval == 0:
            self._roles.keep("ref", changing=True)
        forwarded = self._world.add_up(_forwarded(steps, self._settings.megatron.context_parallel_size))
        return (
            metrics
            | _mismatch(columns, before)
            | {f"train/{name}": float(value) for report in credited for name, value in report.items()}
            | {
                "perf/train_tokens": float(len(batch.tokens)),
                "perf/actor_train_time": time.perf_counter() - start - log_probs_time,
                "perf/log_probs_time": log_probs_time,
                "perf/forwarded_tokens": forwarded["tokens"],
                "perf/padding_frac": 1 - forwarded["tokens"] / forwarded["slots"],
            }
        )

    def mark_sent(self, version: str) -> None:
        """Note that the weights as they are go to the engines as `version`."""
        if self._sent is not None:
            self._sent.sent(version)

    def weights(self, dtype: str) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield buckets of weights under their Hugging Face names; see `hf_buckets`."""
        return hf_buckets(
            self.model,
            self._settings.family,
            self._architecture,
            dtype=getattr(torch, dtype),
            bucket_bytes=self._settings.megatron.update_weight_buffer_size,
        )

    def save(self, folder: Path) -> None:
        """Write all state; see `checkpoint.save`. A critic's is in a folder of its own below."""
        checkpoint.save(self._policy_state, folder)
        if self._critic is not None:
            (folder / _CRITIC).mkdir(exist_ok=True)  # every rank does
            checkpoint.save(self._critic_state(self._critic), folder / _CRITIC)

    def load(self, folder: Path) -> None:
        """Restore all state; see `checkpoint.load`."""
        if self._critic is not None:
            checkpoint.load(self._critic_state(self._critic), folder / _CRITIC)
        checkpoint.load(self._policy_state, folder)
        for role in self._roles.changing:  # what the folder's run kept, and this one does not read
            if self._sent is None if role.startswith(SENT) else "ref_log_probs" not in self._needs:
                self._roles.drop(role)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder, or a PEFT adapter folder with LoRA; see `hf_folder`."""
        settings = self._settings
        if settings.lora.rank is not None:
            save_adapter(
                folder,
                self.model,
                settings.family,
                self._architecture,
                section=settings.lora,
                base=settings.model_path,
            )
        else:
            buckets = self.weights(str(self._dtype).removeprefix("torch."))
            save_model(folder, buckets, config_from=settings.model_path)

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
        """End the process groups."""
        self._world.close()

    @property
    def _policy_state(self) -> checkpoint.TrainerState:
        p = self._policy
        return checkpoint.TrainerState(
            self._architecture, p.model, p.optimizer, p.scheduler, self._roles, self._settings.lora
        )

    def _critic_state(self, critic: Critic) -> checkpoint.TrainerState:
        c = critic.trained
        return checkpoint.TrainerState(self._architecture, c.model, c.optimizer, c.scheduler)

    def _build_policy(self) -> GPTModel:
        settings, section = self._settings, self._settings.megatron
        model = build_model(
            self._architecture,
            section,
            dtype=self._dtype,
            device=self._device,
            provider=settings.hooks.model_provider,
        )
        load_weights(model, self._weights_of(settings.model_path), settings.family, self._architecture)
        if settings.lora.rank is not None:
            names = global_parameters(model, self._architecture)
            add_adapters(model, names, settings.lora, seed=settings.seed)
        freeze(
            model,
            global_parameters(model, self._architecture),
            settings.family.megatron_names(self._architecture),
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
            load_weights(model, self._weights_of(folder), family, architecture)
            clear_adapters(model)

        self._roles.load(role, write)

    def _weights_of(self, folder: Path) -> HfCheckpoint:
        """Return the weights of a folder, found to be what its config.json describes."""
        weights = HfCheckpoint(folder)
        self._settings.family.check_weights(weights, self._architecture)
        return weights

    def _pack(self, batch: TrainBatch) -> list[Step]:
        """Return the micro-batches of this data-parallel rank, for each optimizer step."""
        limit = self._architecture.max_position_embeddings
        longest = int(batch.lengths.max())
        if longest > limit:
            index = int(batch.sample_ids[int(batch.lengths.argmax())])
            raise TrainerError(f"sample {index}: has {longest} tokens; the model's limit is {limit}")
        section, cut = self._settings.megatron, self._world.row_cut
        cos, sin = rotary_tables(self._architecture, longest + cut.most_padding, dtype=self._dtype)
        rotary = cos.to(self._device), sin.to(self._device)
        steps: list[Step] = []
        for samples in batch.optimizer_steps:
            schedule = rank_schedule(
                batch,
                samples.tolist(),
                n_ranks=self._world.data_parallel_size,
                max_tokens=self._settings.train.max_tokens_per_gpu * section.context_parallel_size,
                share=section.share_prefix and section.context_parallel_size == 1,
                cost=partial(forward_flops, self._architecture) if section.balance_data else None,
            )
            steps.append(
                [
                    make_micro_batch(
                        batch,
                        members.families,
                        rotary=rotary,
                        vocab_size=self._architecture.vocab_size,
                        cut=cut,
                        with_entropy="entropy" in self._needs,
                        counted=members.counted,
                    )
                    for members in schedule[self._world.data_parallel_rank]
                ]
            )
        return steps

    def _old_log_probs(
        self, batch: TrainBatch, columns: Columns, steps: Sequence[Step], *, always: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (log-probs of the old policy, those to hold against the engine's); None where not needed.

        Args:
            batch: the samples.
            columns: theirs.
            steps: their micro-batches.
            always: take them in any case.
        """
        if self._settings.train.use_rollout_logprobs:
            if columns.rollout_log_probs is None:
                raise TrainerError(
                    "use_rollout_logprobs: the batch has no rollout_log_probs; use an engine that returns them"
                )
            return columns.rollout_log_probs, None
        if self._sent is not None:
            old = self._sent.log_probs(batch, partial(self._log_probs, columns, steps, "old_actor"))
            return old, old
        if len(steps) == 1 and "old_log_probs" not in self._needs and not always:
            return None, None
        found = self._log_probs(columns, steps, "actor")
        return found, found

    def _fill(self, columns: Columns, steps: Sequence[Step]) -> Columns:
        """Return the columns with what reference, teacher and critic say."""
        filled: dict[str, Tensor] = {}
        for role in ("ref", "teacher"):
            if role in self._roles:
                with self._roles.playing(role):
                    filled[f"{role}_log_probs"] = self._log_probs(columns, steps, role)
        if self._critic is not None:
            filled["values"] = self._critic.values(steps, columns.weights)
        return replace(columns, **filled)

    def _log_probs(self, columns: Columns, steps: Sequence[Step], role: str) -> Tensor:
        """Return log-probs [T] without gradient, under the weights that are in the model: those of `role`."""
        if self._settings.hooks.before_log_prob is not None:
            self._settings.hooks.before_log_prob(self.model, role)
        return self._policy.forward(steps, columns.weights, lambda output: output[0])

    def _before_train_step(self, step: int, number: int) -> None:
        if self._settings.hooks.before_train_step is not None:
            p = self._policy
            self._settings.hooks.before_train_step(step, number, self.model, p.optimizer, p.scheduler)

    def _optimizer_step(self, step: Step, columns: Columns, advantages: Tensor) -> tuple[Metrics, Tensor]:
        """Take one optimizer step. Returns its metrics, and the log-probs [T] before it that this rank computed."""
        trained = torch.full_like(columns.weights, math.nan)

        def loss(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
            trained[micro.columns] = output[0].detach()
            return self._settings.algorithm.loss(columns.view(micro, *output), advantages[micro.columns])

        return self._policy.take_step(step, loss), trained


def _forwarded(steps: Sequence[Step], n_ranks: int) -> dict[str, float]:
    """Return the tokens of all micro-batches, and the slots that attention computes for them, on so many ranks each."""
    packed = [micro.packed for step in steps for micro in step]
    numbers = {"tokens": sum(p.n_tokens for p in packed), "slots": sum(p.n_slots for p in packed)}
    return {name: float(n_ranks * number) for name, number in numbers.items()}


def _mismatch(columns: Columns, log_probs: Tensor | None) -> Metrics:
    """Return the mean difference between the engine's log-probs and ours, over trainable tokens that we have."""
    if columns.rollout_log_probs is None or log_probs is None:
        return {}
    mask = columns.loss_mask * log_probs.isfinite()
    difference = (log_probs.nan_to_num() - columns.rollout_log_probs).abs()
    mean = (difference * mask).sum() / mask.sum().clamp(min=1)
    return {"train/train_rollout_logprob_abs_diff": float(mean)}
