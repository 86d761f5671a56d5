"""What `slime check` says of YaRN's attention factor, which SGLang reads under another name than transformers."""

from __future__ import annotations

import json
import math

import pytest
from slime_core.testing.memory import TINY_QWEN3

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
USUAL = 0.1 * math.log(4) + 1
#: What the usual factor is multiplied by to make 1: DeepSeek-R1-0528-Qwen3-8B has it.
INVERSE = 0.8782488562869419


@pytest.fixture
def problems(tmp_path, problems_of):
    """What is wrong with a run whose model has a table of rotary parameters."""

    def find(table, *more: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({**TINY_QWEN3, "rope_scaling": table}))
        return problems_of(tmp_path, *more)

    return find


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": USUAL},
        {"attention_factor": 1.1386294},  # as many decimals as a file may have
        {"attn_factor": INVERSE},
        {"attn_factor": INVERSE, "attention_factor": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
    ],
)
def test_factors_that_servers_and_trainer_read_alike_are_accepted(problems, more):
    assert problems(YARN | more) == []


def test_a_factor_that_servers_do_not_read_is_refused_with_the_one_that_they_do(problems, tmp_path):
    """They multiply 0.1 ln 4 + 1 = 1.13863 by attn_factor: 0.9 / 1.13863 makes it 0.9."""
    (problem,) = problems(YARN | {"attention_factor": 0.9})
    assert f"model.hf_checkpoint: found {tmp_path}, whose config.json has the attention_factor 0.9" in problem
    assert (
        "SGLang 0.5.23 reads attn_factor in its place, and would multiply cosine and sine by 1.13863"
        in problem
    )
    said = float(problem.split('"attn_factor": ')[1].split()[0])
    assert said == pytest.approx(0.9 / USUAL)
    assert problems(YARN | {"attention_factor": 0.9, "attn_factor": said}) == []
    (problem,) = problems(YARN | {"attention_factor": 0.9, "attn_factor": 2.0})
    assert float(problem.split('"attn_factor": ')[1].split()[0]) == pytest.approx(0.9 / USUAL)


def test_the_kernel_that_stretches_by_another_factor_is_refused(problems):
    (problem,) = problems(YARN, "--sglang-enable-fused-qk-norm-rope")
    assert "sglang.server_args.enable_fused_qk_norm_rope: found it with" in problem
    assert problems({"rope_type": "default"}, "--sglang-enable-fused-qk-norm-rope") == []


def test_where_nothing_is_trained_servers_may_read_what_they_like(problems):
    assert problems(YARN | {"attention_factor": 0.9}, "--train-backend", "none") == []
