"""Rows of as many tokens as products of low precision want, which TransformerEngine refuses otherwise; it is not needed here."""

from __future__ import annotations

import pytest
from slime_megatron.settings.section import MegatronSection

from ..batches import make_batch
from ..layouts import CONTEXT, SEQUENCE, TENSOR, largest_difference


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, 1),
        ({"fp8_recipe": "mxfp8"}, 1),  # of nothing
        ({"fp8_format": "hybrid"}, 16),
        ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4_format": "e2m1"}, 128),
    ],
)
def test_tokens_of_a_rank_are_a_multiple_of_what_the_recipe_wants(flags, wanted):
    from slime_megatron.parallel.process_groups import token_alignment

    assert token_alignment(MegatronSection(megatron_args=flags)) == wanted


@pytest.mark.parametrize(("n", "layout"), [(1, {}), (2, TENSOR | SEQUENCE), (2, TENSOR), (2, CONTEXT)])
def test_padding_to_a_multiple_changes_no_gradient(ranks, cut_models, n, layout):
    common = {"folder": cut_models["qwen3"], "batch": make_batch()}
    _, wanted = ranks.run("train_aligned", 1, megatron={}, alignment=1, **common)[0]
    found = ranks.run("train_aligned", n, megatron=layout, alignment=16, **common)
    assert [rest for rest, _ in found] == [{0}] * n
    assert largest_difference(found[0][1], wanted, relative=True) <= 1e-5
