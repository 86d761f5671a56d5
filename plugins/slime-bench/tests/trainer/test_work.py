"""What `slime bench trainer` measures: published shapes, and the padding of transformers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from slime_bench.random_work import SHAPES, Lengths, random_batch
from slime_bench.trainer.work import Transformers
from slime_models.family.families.qwen3 import QWEN3

#: A tiny Qwen 3 without weights.
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_padding_of_transformers_is_what_its_micro_batches_are_padded_by(qwen3):
    lengths = Lengths(np.array([2, 2, 4]), np.array([3, 7, 6]), "three")
    side = Transformers(qwen3[1], torch.device("cpu"), max_tokens=1000)
    assert side.step(random_batch(lengths, vocab_size=250))().padding == pytest.approx(
        6 / 30
    )  # 5, 9 and 10 tokens in 3 x 10


def test_the_published_shape_has_the_published_parameters():
    """Qwen3-0.6B: 0.6 billion, 0.44 without the embedding (its model card)."""
    architecture = QWEN3.architecture(SHAPES["0.6b"])
    sizes = {name: weight.shape for name, weight in QWEN3.weights(architecture).items()}
    count = {name: torch.Size(shape).numel() for name, shape in sizes.items()}
    assert round(sum(count.values()) / 1e9, 1) == 0.6
    without = sum(n for name, n in count.items() if "embedding" not in name)
    assert round(without / 1e9, 2) == 0.44


def test_forked_conversations_have_the_share_in_common():
    """44 tokens: 32 before the first fork, 4 to the next, 4 to the last, 4 of their own: 88 of 352 differ."""
    lengths = Lengths.forked(16, prompt=10, response=34, shared=0.75)
    assert lengths.common.tolist() == [0, 40, 36, 40, 32, 40, 36, 40] * 2
    batch = random_batch(lengths, vocab_size=10**6)
    rows = batch.tokens.reshape(16, 44)
    alike = [int((one == other).cumprod().sum()) for one, other in pairwise(rows)]
    assert alike == lengths.common.tolist()[1:]
    assert batch.group_ids.tolist() == [0] * 8 + [1] * 8
