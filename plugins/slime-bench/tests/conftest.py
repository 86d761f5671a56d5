"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a tiny random model that transformers made, and its folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return model.eval(), folder
