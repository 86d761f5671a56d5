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

#: Name -> config.json of which a folder with random weights is made: of a published model, or of a small one of its kind.
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {  # Qwen/Qwen3-0.6B
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "moe": {  # the proportions of Qwen/Qwen3-30B-A3B, a quarter as wide, with a quarter of its experts and an eighth of its layers
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "moe_intermediate_size": 192,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's samples."""

    prompts: NDArray[np.int64]
    """Of each sample."""
    responses: NDArray[np.int64]
    """Of each sample."""
    name: str
    """How a table calls them."""
    common: NDArray[np.int64] | None = None
    """First tokens that each has in common with the one before it; none where None."""

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

    @classmethod
    def forked(cls, n: int, *, prompt: int, response: int, shared: float) -> Lengths:
        """Return conversations of eight samples each: one that forks in two, each of which forks again, and once more.

        From one fork to the next, and from the last one to the end, it is as many tokens.

        Args:
            n: samples, a multiple of eight.
            prompt: tokens of each prompt.
            response: tokens of each response.
            shared: the share of all tokens that are those of a sample before, above 10 in 24 and below 7 in 8.
        """
        own = 8 * (
            1 - shared
        )  # in samples: the tokens of a conversation that differ; before the first fork, root / step of them
        step = round((prompt + response) / ((14 - 3 * own) / (own - 1) + 3))
        root = prompt + response - 3 * step
        common = np.tile([0, *(root + step * k for k in (2, 1, 2, 0, 2, 1, 2))], n // 8)
        return cls(
            np.full(n, prompt),
            np.full(n, response),
            f"{n} of {prompt} + {response}, {common.sum() / n / (prompt + response):.0%} shared",
            common,
        )


def random_batch(lengths: Lengths, *, vocab_size: int) -> TrainBatch:
    """Return samples of random ids and rewards, which share nothing but what `lengths` says."""
    draw = np.random.default_rng(1)
    n, responses = len(lengths.prompts), lengths.responses
    offsets = np.concatenate([[0], np.cumsum(responses + lengths.prompts)])
    response_offsets = np.concatenate([[0], np.cumsum(responses)])
    tokens = draw.integers(0, vocab_size, offsets[-1]).astype(np.int32)
    common = np.zeros(n, dtype=np.int64) if lengths.common is None else lengths.common
    for i in np.flatnonzero(common):
        tokens[offsets[i] : offsets[i] + common[i]] = tokens[offsets[i - 1] : offsets[i - 1] + common[i]]
    return TrainBatch(
        step=1,
        tokens=tokens,
        offsets=offsets,
        response_offsets=response_offsets,
        loss_mask=np.ones(response_offsets[-1], dtype=np.float32),
        rollout_log_probs=None,
        teacher_log_probs=None,
        rewards=draw.standard_normal(n).astype(np.float32),
        raw_rewards=np.zeros(n, dtype=np.float32),
        sample_ids=np.arange(n),
        group_ids=np.cumsum(common == 0) - 1,
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
