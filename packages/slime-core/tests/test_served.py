"""Models that a run serves, and how rewards find them by name."""

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.served import forget_addresses, resolve_url, wanted_models, write_addresses


@pytest.mark.parametrize("url", ["http://a:1/v1", "served:", "served:a b", "https://served:80/x", "served"])
def test_any_other_address_stays_as_it_is(url):
    assert resolve_url(url, None) == [url]


def test_a_name_stands_for_the_addresses_of_the_moment(tmp_path):
    write_addresses(tmp_path, "judge", ["http://a:1", "http://a:2"])
    assert resolve_url("served:judge", tmp_path) == ["http://a:1", "http://a:2"]
    assert resolve_url("served:judge/v1/chat", str(tmp_path)) == ["http://a:1/v1/chat", "http://a:2/v1/chat"]
    write_addresses(tmp_path, "judge", [])
    assert resolve_url("served:judge", tmp_path) == []
    forget_addresses(tmp_path, "judge")
    forget_addresses(tmp_path, "judge")
    with pytest.raises(ConfigError, match=r"served:judge: found no .*judge\.json"):
        resolve_url("served:judge", tmp_path)


def test_names_are_found_wherever_settings_have_them():
    flags = ["--hf-checkpoint", "m", "--rollout-batch-size", "1", "--rollout-max-response-len", "1"]
    flags += [
        "--rm-args",
        '{"url": "served:a/v1", "more": [{"x": "served:b"}, 3]}',
        "--run-name",
        "not served:c",
    ]
    settings = load_settings([], flags, registry=Registry.from_environment())
    assert wanted_models(settings) == [("reward.rm_args.url", "a"), ("reward.rm_args.more.x", "b")]
