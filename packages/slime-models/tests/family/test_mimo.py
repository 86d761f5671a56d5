"""MiMo: Qwen 2's table, and names of the MTP layer that count from 0."""

from __future__ import annotations

import torch
from slime_models.family.families.mimo import MIMO
from slime_models.family.families.qwen2 import QWEN2

from ..conftest import tiny_config
from .test_rules import assert_round_trip

CONFIG = tiny_config("mimo", num_nextn_predict_layers=2, head_dim=5, tie_word_embeddings=False)


def test_the_decoder_is_qwen_2s():
    qwen2 = QWEN2.architecture(CONFIG | {"model_type": "qwen2"})
    assert MIMO.hf_shapes(MIMO.architecture(CONFIG)) == QWEN2.hf_shapes(qwen2)
    assert MIMO.architecture(CONFIG | {"num_nextn_predict_layers": 0}).mtp_num_layers == 0


def test_mtp_layers_have_the_names_that_sglang_loads():
    alone = MIMO.architecture(CONFIG)
    held = alone.with_mtp()
    assert_round_trip(MIMO, held)
    own = MIMO.hf_shapes(held).keys() - MIMO.hf_shapes(alone).keys()
    first = {name.removeprefix("model.mtp_layers.0.") for name in own if ".mtp_layers.0." in name}
    assert len(own) == 2 * len(first)
    decoder = {name.removeprefix("model.layers.0.") for name in MIMO.hf_shapes(alone) if ".layers.0." in name}
    outer = {"token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"}
    assert first == decoder | {f"{name}.weight" for name in outer}
    folder = {name: torch.zeros(shape) for name, shape in MIMO.hf_shapes(held).items()}
    assert MIMO.has_mtp(folder, alone)
    assert set(MIMO.left_over(folder, alone)) == own
    assert not MIMO.left_over(folder, held)


def test_hidden_states_come_first_in_folders_and_embeddings_in_megatron():
    held = MIMO.architecture(CONFIG | {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1})
    name = "mtp.layers.1.eh_proj.weight"
    weight = MIMO.weight(name, held.with_mtp())
    assert list(weight.hf) == ["model.mtp_layers.1.input_proj.weight"]
    hf = {"model.mtp_layers.1.input_proj.weight": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])}
    found = MIMO.to_megatron_tensor(name, hf, held.with_mtp())
    assert found.tolist() == [[3, 4, 1, 2], [7, 8, 5, 6]]
