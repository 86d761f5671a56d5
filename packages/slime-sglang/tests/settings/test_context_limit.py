"""How many tokens a server's context has, as SGLang counts them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from slime_sglang.factory import context_limit
from slime_sglang.settings.section import FleetSection, SglangSection


@pytest.mark.parametrize(
    ("server_args", "wanted"),
    [
        ({}, 4096),
        ({"context_length": 1000}, 1000),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 8}, 4088),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4, "speculative_num_steps": 5}, 4076),
    ],
)
def test_the_context_is_the_models_or_the_servers_less_what_a_draft_model_needs(
    tmp_path, server_args, wanted
):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    sections = {SglangSection: SglangSection(server_args=server_args), FleetSection: FleetSection()}
    build = SimpleNamespace(section=sections.__getitem__, model_path=tmp_path)
    assert context_limit(build) == wanted
