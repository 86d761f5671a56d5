"""Random models and samples, for benchmarks in which it does not matter what is computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.samples import TrainBatch


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's samples."""

    prompts: NDArray[np.int64]
    """Of each sample."""
    responses: NDArray[np.int64]
    """Of each sample."""
    name: str
    """How a table calls them."""

    @classmethod
    def drawn(cls, n: int, *, prompt: int, response: int) -> Lengths:
        """Return samples whose responses are between half and one and a half of `response` long."""
        draw = np.random.default_rng(0)
        responses = draw.integers(max(1, response // 2), response * 3 // 2 + 1, n)
        return cls(np.full(n, prompt), responses, f"{n} of {prompt} + about {response}")

    @classmethod
    def equal(cls, n: int, length: int) -> Lengths:
        """Return samples of `length` tokens, of which all but the first are trained: full fine-tuning."""
        return cls(np.full(n, 1), np.full(n, length - 1), f"{n} of {length}")


def random_batch(lengths: Lengths, *, vocab_size: int) -> TrainBatch:
    """Return samples of random ids and rewards, no two of which share a prompt."""
    draw = np.random.default_rng(1)
    n, responses = len(lengths.prompts), lengths.responses
    offsets = np.concatenate([[0], np.cumsum(responses + lengths.prompts)])
    response_offsets = np.concatenate([[0], np.cumsum(responses)])
    return TrainBatch(
        step=1,
        tokens=draw.integers(0, vocab_size, offsets[-1]).astype(np.int32),
        offsets=offsets,
        response_offsets=response_offsets,
        loss_mask=np.ones(response_offsets[-1], dtype=np.float32),
        rollout_log_probs=None,
        teacher_log_probs=None,
        rewards=draw.standard_normal(n).astype(np.float32),
        raw_rewards=np.zeros(n, dtype=np.float32),
        sample_ids=np.arange(n),
        group_ids=np.arange(n),
        rollout_ids=np.arange(n),
        truncated=np.zeros(n, dtype=np.bool_),
        optimizer_steps=(np.arange(n),),
        weights=np.repeat(1 / responses / n, responses).astype(np.float32),
        temperature=1.0,
    )


def write_random_model(config: dict[str, Any], folder: Path) -> None:
    """Write a Hugging Face folder with random bfloat16 weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it so
    (folder / "config.json").write_text(json.dumps(config))
    config_of_model = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config_of_model, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # as above
    model.save_pretrained(folder)
