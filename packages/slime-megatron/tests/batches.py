"""Random batches, and transformers' log-probs of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from slime_core.samples import TrainBatch

from .tiny_models import VOCAB


def make_batch(
    *,
    lengths: tuple[tuple[int, int], ...] = ((5, 9), (12, 3), (4, 20), (7, 1), (6, 14), (5, 11)),
    n_steps: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    rollout_log_probs: bool = True,
) -> TrainBatch:
    """Return random samples of these (prompt, response) lengths; some response tokens are masked."""
    draw = np.random.default_rng(seed)
    prompts, responses = np.array(lengths, dtype=np.int64).T
    offsets = np.concatenate([[0], np.cumsum(prompts + responses)])
    response_offsets = np.concatenate([[0], np.cumsum(responses)])
    n, n_tokens = len(lengths), int(response_offsets[-1])
    steps = tuple(np.array_split(np.arange(n), n_steps))
    mask = (draw.random(n_tokens) < 0.9).astype(np.float32)
    weights = np.zeros(n_tokens, dtype=np.float32)
    for step in steps:
        for i in step:
            own = slice(response_offsets[i], response_offsets[i + 1])
            weights[own] = mask[own] / max(1.0, mask[own].sum()) / len(step)
    return TrainBatch(
        step=1,
        tokens=draw.integers(0, VOCAB, offsets[-1]).astype(np.int32),
        offsets=offsets,
        response_offsets=response_offsets,
        loss_mask=mask,
        rollout_log_probs=-draw.random(n_tokens).astype(np.float32) * 8 if rollout_log_probs else None,
        teacher_log_probs=None,
        rewards=draw.standard_normal(n).astype(np.float32),
        raw_rewards=np.zeros(n, dtype=np.float32),
        sample_ids=np.arange(n) + 100,
        group_ids=np.arange(n) // 2,
        rollout_ids=np.arange(n),
        truncated=np.zeros(n, dtype=np.bool_),
        optimizer_steps=steps,
        weights=weights,
        temperature=temperature,
    )


def hf_log_probs(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return transformers' log-probs [T] of the batch's response tokens, one sample at a time, with gradient."""
    found = []
    for i in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        logits = model(tokens[None]).logits[0].float() / batch.temperature
        log_probs = torch.log_softmax(logits, dim=-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        found.append(log_probs[len(tokens) - 1 - int(batch.response_lengths[i]) :])
    return torch.cat(found)
