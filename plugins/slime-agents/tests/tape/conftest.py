"""Fixtures of the tape's tests: a tokenizer for each published chat template."""

from __future__ import annotations

import functools

import pytest
from slime_agents.formats.glm import Glm
from slime_agents.formats.hermes import Hermes
from slime_agents.formats.llama import Llama
from slime_agents.formats.qwen3_coder import Qwen3Coder

from .chat_templates import TEMPLATES

FORMATS = {"json": Hermes(), "xml": Glm(), "llama": Llama(), "qwen3_coder": Qwen3Coder()}


@pytest.fixture(scope="session")
def smollm2_folder():
    from slime_models.hf.fetch import resolve

    return resolve("smollm2-135m", progress=lambda line: None)


@pytest.fixture(scope="session")
def tokenizer_of(smollm2_folder):
    """Returns (name of a template) -> (tokenizer, ids that end turns besides the tokenizer's own)."""
    from slime_models.hf.tokenizer import load_tokenizer
    from tokenizers import AddedToken

    @functools.cache
    def build(name):
        published, tokenizer = TEMPLATES[name], load_tokenizer(smollm2_folder)
        inner = tokenizer.inner
        inner.add_tokens([AddedToken(one, normalized=False) for one in published.added])
        special = [AddedToken(one, special=True, normalized=False) for one in published.special]
        inner.add_tokens(special, special_tokens=True)
        if published.template is not None:
            inner.chat_template = published.template
        if published.special:
            inner.eos_token = published.special[0]
            tokenizer.eos_token_id = inner.eos_token_id
        also = tuple(inner.convert_tokens_to_ids(one) for one in published.also_ends)
        return tokenizer, also

    return build
