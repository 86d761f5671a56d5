"""What `slime bench trainer` measures: a step's samples, and what ours and transformers do with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from slime_core.config.sections import TrainSection
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import Algorithm
from slime_core.samples import TrainBatch
from slime_megatron.batch.bin_packing import pack_micro_batches
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.section import MegatronSection
from slime_models.hf.config import read_config

from slime_bench.trainer.peak import finish

if TYPE_CHECKING:
    from slime_megatron.learner.learner import Learner
    from slime_models.family.architecture import Architecture

#: Of both sides.
_LR, _CLIP_GRAD = 1e-6, 1.0


@dataclass(frozen=True)
class Done:
    """What a step says of itself."""

    padding: float
    """Share of its token slots that are padding."""
    update_s: float
    """Seconds of the optimizer's part: clipping, AdamW, weights in bfloat16."""


#: Runs one step.
Step = Callable[[], Done]


def needed_flops(architecture: Architecture, batch: TrainBatch) -> int:
    """Return the floating point operations that a step over the batch needs: forward, and twice that backward."""
    from slime_megatron.batch.trees.flops import forward_flops  # imports Megatron
    from slime_megatron.batch.trees.token_tree import TokenTree

    return 3 * sum(forward_flops(architecture, TokenTree.of_sample(batch, i)) for i in range(len(batch)))


class Ours:
    """A trainer of ours: log-probs, gradients, AdamW with float32 master weights."""

    name = "slime"

    def __init__(self, folder: Path, registry: Registry, *, max_tokens: int) -> None:
        from slime_megatron.learner.learner import Learner

        family = registry.resolve("slime.models", read_config(folder)["model_type"])
        self.architecture: Architecture = family.architecture(read_config(folder))
        self._learner: Learner = Learner(
            LearnerSettings(
                model_path=folder,
                family=family,
                train=TrainSection(max_tokens_per_gpu=max_tokens, lr=_LR, clip_grad=_CLIP_GRAD),
                megatron=MegatronSection(),
                algorithm=Algorithm(_estimator, _loss, frozenset(), "raw"),
                seed=0,
            )
        )

    @property
    def n_parameters(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self._learner.model.parameters())

    def step(self, batch: TrainBatch) -> Step:
        """Return a whole optimizer step over the batch; padding is that of attention, nothing else has any."""

        def run() -> Done:
            padding = self._learner.train(batch)["perf/padding_frac"]
            return Done(padding, self._learner.times.total_s("optimizer_update"))

        return run

    def close(self) -> None:
        """End the process groups."""
        self._learner.close()


def _estimator(view: Any) -> tuple[Any, Any]:
    advantages = view.rewards[view.sample_of_token]
    return advantages, advantages


def _loss(view: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
    return view.reduce(-(view.log_probs - view.old_log_probs).exp() * advantages), {}


class Transformers:
    """transformers' own model, and torch's AdamW over float32 master weights: what ours does, as its users do it."""

    name = "transformers"

    def __init__(self, folder: Path, device: torch.device, *, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model, self._device, self._max_tokens = model.to(device).train(), device, max_tokens
        self._weights: list[torch.Tensor] = list(self._model.parameters())
        self._masters = [weight.detach().float() for weight in self._weights]
        defaults = TrainSection()
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=_LR,
            betas=(defaults.adam_beta1, defaults.adam_beta2),
            eps=defaults.adam_eps,
            weight_decay=defaults.weight_decay,
            fused=True,
        )

    def step(self, batch: TrainBatch) -> Step:
        """Return an optimizer step over the batch, in micro-batches padded on the right to their longest sample."""
        cut = pack_micro_batches(batch.lengths.tolist(), self._max_tokens)
        padded = [self._padded(batch, samples) for samples in cut]
        computed = sum(tokens.numel() for tokens, _, _ in padded)

        def run() -> Done:
            for tokens, mask, labels in padded:
                self._model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
            finish(self._device)
            start = time.perf_counter()
            self._update()
            finish(self._device)
            return Done(1 - len(batch.tokens) / computed, time.perf_counter() - start)

        return run

    @torch.no_grad()
    def _update(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, _CLIP_GRAD)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)

    def _padded(self, batch: TrainBatch, samples: Sequence[int]) -> list[torch.Tensor]:
        """Return ids, attention mask, and labels without prompts."""
        rows = [
            torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
            for i in samples
        ]
        pad = torch.nn.utils.rnn.pad_sequence
        labels = [row.clone() for row in rows]
        for i, label in zip(samples, labels, strict=True):
            label[: -int(batch.response_lengths[i])] = -100
        tokens, mask = (pad(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
        whole = (tokens, mask, pad(labels, batch_first=True, padding_value=-100))
        return [tensor.to(self._device) for tensor in whole]
