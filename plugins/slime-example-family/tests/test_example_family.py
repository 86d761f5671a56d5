"""The example family against transformers, and the page that quotes it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from slime_core.errors import ContractError, DataError
from slime_example_family.family import GEMMA3
from slime_megatron.testing import check_trained_family, random_model
from slime_models.testing import check_family, check_quantized_family
from slime_torch.testing import check_served_family

PACKAGE = Path(__file__).parents[1]
#: Two of three layers see 8 tokens; heads of 16 are wider than 48 / 4.
TINY = {
    "model_type": "gemma3_text",
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 12,
}
#: Of google/gemma-3-1b-it, as its folder on the hub has it.
ONE_B = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_the_table_keeps_the_promises_of_a_family():
    check_family(GEMMA3, TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model(TINY, tmp_path_factory.mktemp("gemma3"))


@pytest.mark.proves("gemma3_text", "train", "convert", "lora")
def test_the_trainer_computes_what_transformers_does(folder):
    check_trained_family(GEMMA3, folder)


@pytest.mark.proves("gemma3_text", "torch")
@pytest.mark.parametrize("with_kernels", [True, False])
def test_the_engine_generates_what_transformers_does(folder, with_kernels):
    check_served_family(GEMMA3, folder, with_kernels=with_kernels)


@pytest.mark.proves("gemma3_text", "fp8")
def test_folders_are_quantised_within_half_a_step(tmp_path):
    found = check_quantized_family(GEMMA3, TINY, tmp_path)
    assert len(found) == 3 * 7 and all(name.endswith("_proj.weight") for name in found)


OTHERS = [
    {"sliding_window": 9},
    {"sliding_rope_theta": 9e3},
    {"query_pre_attn_scalar": 16.0},
    {"rope_theta": 9e5},
]


@pytest.mark.parametrize("changes", OTHERS)
def test_each_field_of_its_own_matters_to_the_engine(folder, changes):
    def read(config):
        return dataclasses.replace(GEMMA3.architecture(config), **changes)

    with pytest.raises(ContractError, match=r"family gemma3_text, engine torch: .* log-probs .* apart"):
        check_served_family(dataclasses.replace(GEMMA3, architecture=read), folder)


@pytest.mark.parametrize("changes", OTHERS)
def test_each_field_of_its_own_matters(folder, changes):
    def read(config):
        return dataclasses.replace(GEMMA3.architecture(config), **changes)

    with pytest.raises(ContractError, match="family gemma3_text: logits: found a difference"):
        check_trained_family(dataclasses.replace(GEMMA3, architecture=read), folder)


def test_files_of_either_age_are_read(folder):
    old = GEMMA3.architecture(ONE_B)
    assert (old.num_layers, old.query_size, old.key_value_size, old.tie_word_embeddings) == (
        26,
        1024,
        256,
        True,
    )
    assert old.sliding_layers == tuple(layer for layer in range(26) if layer not in (5, 11, 17, 23))
    assert (old.rope_theta, old.sliding_rope_theta, old.sliding_window) == (1e6, 1e4, 512)
    new = GEMMA3.architecture(json.loads((folder / "config.json").read_text()))
    assert (new.sliding_layers, new.rope_theta, new.sliding_rope_theta) == ((0, 2), 1e6, 1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: found 30.0; wanted null"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling: found"),
        ({"layer_types": ["chunked_attention"] * 26}, r"layer_types\[0\]: found 'chunked_attention'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: found True; wanted False"),
        ({"hidden_activation": "relu"}, "hidden_activation: found 'relu'; wanted 'gelu_pytorch_tanh'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(changes, message):
    with pytest.raises(DataError, match=message):
        GEMMA3.architecture(ONE_B | changes)


def test_flops_leave_out_what_windows_hide():
    """A sequence of 10 tokens under windows of 8: the last two see 1 and 2 tokens less, in 2 layers of 64 query columns."""
    from slime_example_family.layers import gemma3_flops
    from slime_megatron.batch.trees.flops import forward_flops
    from slime_megatron.batch.trees.token_tree import TokenTree

    architecture = GEMMA3.architecture(TINY)
    for group, hidden in (
        (TokenTree.of_prompt(10, ()), 3),
        (TokenTree.of_prompt(8, ()), 0),
        (TokenTree.of_prompt(4, (6, 5)), 3 + 1),
    ):
        found = forward_flops(architecture, group) - gemma3_flops(architecture, group)
        assert found == 2 * 2 * 64 * hidden * 2
    assert gemma3_flops(architecture, TokenTree.of_prompt(8, ())) > 0


@pytest.mark.parametrize(
    ("language", "file"),
    [
        ("python", "src/slime_example_family/family.py"),
        ("python", "src/slime_example_family/layers.py"),
        ("python", "src/slime_example_family/decoder.py"),
        ("toml", "pyproject.toml"),
    ],
)
def test_page_quotes_the_package_word_for_word(language, file):
    page = (PACKAGE.parents[1] / "docs" / "add-a-model.md").read_text()
    assert f"```{language}\n{(PACKAGE / file).read_text()}```\n" in page
