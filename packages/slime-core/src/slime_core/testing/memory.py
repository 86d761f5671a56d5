"""Questions about the memory of a run with a tiny model, for tests of what trainers and engines predict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.config.build import MemoryQuestion
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.protocols.memory import Device

#: A qwen3 whose numbers can be counted by hand. Queries 4 x 4 = 16 wide, keys and values 2 x 4 = 8. A layer: 2 norms of 8;
#: qkv (16 + 2 x 8) x 8 = 256; norms of queries and keys 2 x 4; output 8 x 16 = 128; gate and up 2 x 16 x 8 = 256; down
#: 8 x 16 = 128: 792. Embedding and output layer 32 x 8 = 256 each, the last norm 8. In all 2 x 792 + 2 x 256 + 8 = 2,104.
TINY_QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
#: What `memory_question` asks for: 8 prompts a rollout, responses of at most 24 tokens.
_FLAGS = ("--rollout-batch-size", "8", "--rollout-max-response-len", "24")


def write_config(folder: Path, config: Mapping[str, Any] = TINY_QWEN3) -> Path:
    """Write a model's config.json, without weights; returns the folder."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def memory_question(folder: Path, *flags: str, device: Device, prompt_tokens: int = 8) -> MemoryQuestion:
    """Return a question about a run of 8 prompts a rollout whose responses have at most 24 tokens.

    Args:
        folder: of the model; a config.json is enough.
        flags: further ones of `slime train`.
        device: that each rank and engine has.
        prompt_tokens: of the longest prompt.
    """
    registry = Registry.from_environment()
    return MemoryQuestion(
        settings=load_settings([], ["--hf-checkpoint", str(folder), *_FLAGS, *flags], registry=registry),
        registry=registry,
        model_path=folder,
        device=device,
        prompt_tokens=prompt_tokens,
    )
