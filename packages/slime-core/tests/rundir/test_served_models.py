"""Models that a run serves, and how rewards find them by name."""

import stat

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.rundir.served_models import (
    forget_addresses,
    key_of,
    resolve_url,
    wanted_models,
    write_addresses,
)


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


def test_the_key_of_a_model_is_for_those_who_ask_it_by_name_and_for_no_other_user(tmp_path):
    write_addresses(tmp_path, "judge", ["http://a:1"], key="secret")
    assert key_of("served:judge", tmp_path) == key_of("served:judge/v1", str(tmp_path)) == "secret"
    (file,) = (tmp_path / "served").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)  # as another process may have left it
    write_addresses(tmp_path, "judge", [], key="another")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key_of("served:judge", tmp_path) == "another"
    write_addresses(tmp_path, "judge", [])
    assert key_of("served:judge", tmp_path) is None
    assert key_of("http://a:1", tmp_path) is key_of("http://a:1", None) is None
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["judge.json"]
    forget_addresses(tmp_path, "judge")
    with pytest.raises(ConfigError, match=r"served:judge: found no .*judge\.json"):
        key_of("served:judge", tmp_path)


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
