"""`Learner`: one rank of the trainer. Everything here is synchronous, and runs on one thread."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from slime_core.batch import TrainBatch
from slime_core.errors import TrainerError
from slime_core.protocols import Metrics
from slime_models.checkpoint import HfCheckpoint, read_config
from torch import Tensor

from slime_megatron import checkpoint, world
from slime_megatron.columns import Columns
from slime_megatron.compat import quiet
from slime_megatron.export import hf_buckets
from slime_megatron.flops import forward_flops
from slime_megatron.layout import check_model
from slime_megatron.micro_batch import MicroBatch, make_micro_batch
from slime_megatron.model import build_model, load_weights, response_log_probs, wrap_for_gradients
from slime_megatron.optimizer import build_optimizer, build_scheduler, learning_rate, update
from slime_megatron.rotary import rotary_tables
from slime_megatron.schedule import rank_schedule
from slime_megatron.settings import LearnerSettings

Step = Sequence[MicroBatch]
_ForEachMicroBatch = Callable[[MicroBatch, tuple[Tensor, Tensor | None]], Any]


class Learner:
    """The model, its optimizer, and what is done with them. Methods are collective over the world."""

    def __init__(self, settings: LearnerSettings) -> None:
        train, section = settings.train, settings.megatron
        self._settings = settings
        architecture = settings.family.architecture(read_config(settings.model_path))
        check_model(section, architecture)
        self._architecture = architecture.with_padded_vocab(section.tensor_model_parallel_size)
        self._device = world.device()
        self._dtype = torch.bfloat16 if train.bf16 else torch.float32
        self._skipped_in_a_row = 0
        self._world = world.World(section, seed=settings.seed)
        with contextlib.ExitStack() as on_failure, quiet():
            on_failure.callback(self._world.close)
            model = build_model(self._architecture, section, dtype=self._dtype, device=self._device)
            load_weights(model, HfCheckpoint(settings.model_path), settings.family, self._architecture)
            self._model = wrap_for_gradients(model, section)
            self._optimizer = build_optimizer(self._model, train, section)
            self._scheduler = build_scheduler(self._optimizer, train, total_steps=settings.total_steps)
            on_failure.pop_all()
        self._model.config.finalize_model_grads_func = _finish_gradients

    @property
    def model(self) -> GPTModel:
        """This rank's part of the model; gradients of the last optimizer step are in `parameter.main_grad`."""
        return self._model.module

    def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; see `Trainer.train`. Every rank is given the same whole batch."""
        start = time.perf_counter()
        steps = self._pack(batch)
        columns = Columns.of(batch, self._device)
        log_probs_start = time.perf_counter()
        old, before = self._old_log_probs(columns, steps)
        log_probs_time = time.perf_counter() - log_probs_start
        columns = columns.with_old(old)
        with torch.no_grad():
            advantages, _, *credited = self._settings.algorithm.estimator(columns.whole(batch))
        total: Counter[str] = Counter()
        rates, norms = [], []
        for number, step in enumerate(steps):
            rates.append(learning_rate(self._optimizer))
            metrics, norm, trained = self._optimizer_step(step, columns, advantages)
            if number == 0 and before is None:
                before = self._world.merge(trained)
            norms.append(norm)
            total.update(metrics)
        taken = [norm for norm in norms if math.isfinite(norm)]
        averages = {f"train/{name}": value / len(steps) for name, value in self._world.add_up(total).items()}
        averages["train/lr"] = sum(rates) / len(steps)
        if taken:
            averages["train/grad_norm"] = sum(taken) / len(taken)
        averages["train/skipped_steps"] = float(len(steps) - len(taken))
        forwarded = self._world.add_up(_forwarded(steps, self._settings.megatron.context_parallel_size))
        return (
            averages
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
        """Write all state; see `checkpoint.save`."""
        checkpoint.save(self._state, folder)

    def load(self, folder: Path) -> None:
        """Restore all state; see `checkpoint.load`."""
        checkpoint.load(self._state, folder)

    def offload(self) -> None:
        """Move the optimizer's state to the host and free the gradients. Nothing to do on a CPU."""
        if self._device.type == "cuda":
            self._optimizer.offload_to_cpu()
            self._model.offload_grad_buffers()

    def onload(self) -> None:
        """Undo `offload`."""
        if self._device.type == "cuda":
            self._model.restore_grad_buffers()
            self._optimizer.restore_from_cpu()

    def close(self) -> None:
        """End the process groups."""
        self._world.close()

    @property
    def _state(self) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(self._architecture, self._model, self._optimizer, self._scheduler)

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
                        with_entropy="entropy" in self._settings.algorithm.needs,
                        counted=members.counted,
                    )
                    for members in schedule[self._world.data_parallel_rank]
                ]
            )
        return steps

    def _old_log_probs(self, columns: Columns, steps: Sequence[Step]) -> tuple[Tensor | None, Tensor | None]:
        """Return (log-probs of the old policy, log-probs under the weights as they are); None where not needed."""
        if self._settings.train.use_rollout_logprobs:
            if columns.rollout_log_probs is None:
                raise TrainerError(
                    "use_rollout_logprobs: the batch has no rollout_log_probs; use an engine that returns them"
                )
            return columns.rollout_log_probs, None
        if len(steps) == 1 and "old_log_probs" not in self._settings.algorithm.needs:
            return None, None
        found = torch.full_like(columns.weights, math.nan)

        def keep(micro: MicroBatch, output: tuple[Tensor, Tensor | None]) -> None:
            found[micro.columns] = output[0]

        with torch.no_grad():
            for step in steps:
                self._run(step, keep, forward_only=True)
        found = self._world.merge(found)
        return found, found

    def _optimizer_step(
        self, step: Step, columns: Columns, advantages: Tensor
    ) -> tuple[dict[str, float], float, Tensor]:
        """Take one optimizer step.

        Returns its metrics of this rank's share, the gradient's norm, and the log-probs [T] before it, NaN on tokens
        of other steps and ranks. A last pipeline stage alone has metrics and log-probs.
        """
        trained = torch.full_like(columns.weights, math.nan)

        def loss(
            micro: MicroBatch, output: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            trained[micro.columns] = output[0].detach()
            value, metrics = self._settings.algorithm.loss(
                columns.view(micro, *output), advantages[micro.columns]
            )
            shares = {"loss": value.detach(), **metrics}
            return value, torch.tensor(micro.columns.numel(), dtype=torch.int), shares

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        shares = self._run(step, loss, forward_only=False)
        metrics = {
            name: float(sum(share[name] for share in shares)) for name in (shares[0] if shares else ())
        }
        norm = update(self._optimizer, clip_grad=self._settings.train.clip_grad)
        if math.isfinite(norm):
            self._scheduler.step(1)
            self._skipped_in_a_row = 0
        else:
            self._skip(norm)
        return metrics, norm, trained

    def _run(self, step: Step, each: _ForEachMicroBatch, *, forward_only: bool) -> list[Any]:
        """Run the model, and its gradients unless `forward_only`, over micro-batches; return what `each` returned."""

        def forward(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            micro = next(micro_batches)
            output = model(
                input_ids=micro.tokens,
                position_ids=None,
                attention_mask=None,
                packed_seq_params=micro.packed,
                output_processor=response_log_probs,
                output_processor_context=micro.responses,
            )
            if isinstance(output, tuple):  # the last stage's; a schedule asks the output for its device
                output = torch.stack([part for part in output if part is not None])
            return output, partial(_call, each, micro)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(step),
            model=self._model,
            num_microbatches=len(step),
            seq_length=self._architecture.max_position_embeddings,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _skip(self, norm: float) -> None:
        self._skipped_in_a_row += 1
        limit = self._settings.megatron.max_skipped_steps
        if self._skipped_in_a_row > limit:
            raise TrainerError(
                f"the gradient norm is {norm} and {self._skipped_in_a_row} optimizer steps in a row were skipped; "
                f"max_skipped_steps is {limit}; lower the learning rate, or look for bad samples in the last step"
            )


def _finish_gradients(model: list[Any], _num_tokens: Tensor | None, **groups: Any) -> None:
    """Sum gradients over ranks. Without the number of tokens, by which Megatron would divide: shares add up."""
    finalize_model_grads(model, None, **groups)


def _call(
    each: _ForEachMicroBatch,
    micro: MicroBatch,
    output: Tensor,
    non_loss_data: bool = False,
) -> Any:
    """Call `each` with log-probs and entropies; Megatron adds `non_loss_data` where no gradient is wanted."""
    log_probs, *entropy = output.unbind()
    return each(micro, (log_probs, entropy[0] if entropy else None))


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
