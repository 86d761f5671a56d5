"""Secrets among the settings are in the run's folder, and masked for whoever does not see it."""

from __future__ import annotations

import json

from slime_core.config.load import load_settings
from slime_core.config.secrets import masked


def test_headers_and_variables_whose_names_say_so_are_masked_and_nothing_else():
    headers = {"Authorization": "Bearer abc", "X-Id": "7"}
    tools = {"search": {"kind": "http", "url": "http://a", "headers": headers}}
    shown = {"Authorization": "***", "X-Id": "***"}
    assert masked("tools", tools) == {"search": {"kind": "http", "url": "http://a", "headers": shown}}
    assert masked("tools", [tools]) == [masked("tools", tools)]
    assert masked("label_key", "answer") == "answer"
    assert masked("rollout_stop_token_ids", [1, 2]) == [1, 2]


def test_a_recipe_for_trackers_has_masks(registry_of):
    variables = json.dumps({"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"})
    given = ["--hf-checkpoint", "m", "--rollout-max-response-len", "8", "--train-env-vars", variables]
    given += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    settings = load_settings([], given, registry=registry_of())
    assert "hf_abc" in settings.to_toml()
    public = settings.to_toml(is_public=True)
    assert "hf_abc" not in public and 'HF_TOKEN = "***"' in public and 'NCCL_DEBUG = "INFO"' in public
    assert public.replace("***", "hf_abc") == settings.to_toml()
