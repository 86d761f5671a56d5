"""YaRN in the dense families and those with Qwen's experts: what files say, and what transformers and SGLang make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from slime_core.errors import DataError
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen2_moe import QWEN2_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.family import ModelFamily
from slime_models.family.rotary import attention_factor, inverse_frequencies
from slime_models.family.yarn import YarnScaling

from ..conftest import tiny_config

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)}
#: Of the model cards of Qwen 2.5 and of Qwen 3.
QWEN2_CARD = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QWEN3_CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
#: Of deepseek-ai/DeepSeek-R1-0528-Qwen3-8B: as much as makes the product with 0.1 ln 4 + 1 one.
R1_QWEN3 = QWEN3_CARD | {"attn_factor": 0.8782488562869419}
USUAL = 0.1 * math.log(4) + 1


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> ModelFamily:
    return FAMILIES[request.param]


def scaling(config: dict[str, Any], family: ModelFamily = QWEN3) -> YarnScaling:
    found = family.architecture(config).rope_scaling
    assert isinstance(found, YarnScaling)
    return found


def test_what_model_cards_say_is_read_in_both_spellings(family: ModelFamily) -> None:
    config = tiny_config(family.model_type, max_position_embeddings=40960)
    found = family.architecture(config | {"rope_scaling": QWEN2_CARD})
    assert found.rope_scaling == YarnScaling(
        factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=USUAL, original_max_position_embeddings=32768
    )  # fmt: skip
    assert (
        found.max_position_embeddings == 40960
    )  # also of engines: a card's factor alone makes no longer context
    assert found == family.architecture(config | {"rope_scaling": QWEN3_CARD})
    newer = {"rope_parameters": QWEN3_CARD | {"rope_theta": 10_000.0}}
    assert found == family.architecture(config | newer)


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 0.9}, {"beta_fast": 4.0, "truncate": False}])
def test_angles_are_those_of_transformers(family: ModelFamily, changes: dict[str, Any]) -> None:
    """Of a head of 64, at most one part in 10 million apart, in float32."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    more = {"hidden_size": 256, "rope_theta": 1e6, "max_position_embeddings": 131072}
    if "head_dim" in tiny_config(family.model_type):
        more["head_dim"] = 64
    config = tiny_config(family.model_type, **more) | {"rope_scaling": QWEN3_CARD | changes}
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**config), None)
    found = family.architecture(config)
    assert torch.allclose(inverse_frequencies(found), wanted, rtol=3e-7, atol=0)
    assert attention_factor(found) == pytest.approx(factor)


def test_cosine_and_sine_are_multiplied_by_what_a_published_file_means() -> None:
    """SGLang and vLLM multiply by `attn_factor`, which transformers passes over; all three read a file that says both."""
    config = tiny_config("qwen3", max_position_embeddings=131072)
    assert scaling(config | {"rope_scaling": R1_QWEN3}).attention_factor == pytest.approx(1.0, abs=1e-15)
    both = R1_QWEN3 | {"attention_factor": 1.0}
    assert scaling(config | {"rope_scaling": both}).attention_factor == 1.0
    other = QWEN3_CARD | {"attention_factor": 0.8}
    assert scaling(config | {"rope_scaling": other}).attention_factor == 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings: found None"),
        ({"attn_factor": "1"}, "attn_factor: found '1'; wanted a number above 0"),
        ({"extrapolation_factor": 1.0}, "extrapolation_factor: found 1.0; wanted nothing: it is not implemented"),
        ({"rope_type": "dynamic"}, "rope_type: found 'dynamic'; wanted 'default' or 'yarn'"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    config = tiny_config("qwen3", max_position_embeddings=131072)
    with pytest.raises(DataError, match=f"rope_scaling: {message}"):
        QWEN3.architecture(config | {"rope_scaling": QWEN3_CARD | changes})
