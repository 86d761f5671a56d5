"""The registry: names mean what metadata says, or are refused with what is installed."""

from __future__ import annotations

import sys

import pytest
from slime_core.errors import PluginError

REWARDS = "[slime.rewards]\n{name} = {value}\n"


def test_name_resolves_to_its_distribution(install, registry_of):
    install(
        "acme-rewards",
        REWARDS.format(name="brevity", value="acme:brevity"),
        acme="def brevity(s): return 1.0",
    )
    registry = registry_of()
    plugin = registry.find("slime.rewards", "brevity")
    assert (plugin.distribution, plugin.version, plugin.value) == ("acme-rewards", "1.0", "acme:brevity")
    assert registry.load(plugin)("x") == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("brevty", "did you mean 'brevity'?"),
        ("exct", "did you mean 'exact'? install slime-rm, which brings it"),
        ("exact", "install slime-rm, which brings it"),
        ("zzzzzz", "installed: brevity"),
    ],
)
def test_unknown_name_gets_the_nearest_or_what_is_installed(install, registry_of, name, said):
    install("acme", REWARDS.format(name="brevity", value="acme:brevity"))
    with pytest.raises(PluginError) as caught:
        registry_of().find("slime.rewards", name)
    assert str(caught.value) == f"slime.rewards: no plugin is named {name!r}; {said}"


def test_of_a_group_without_plugins_it_is_said_that_none_is_installed(registry_of):
    with pytest.raises(PluginError) as caught:
        registry_of().find("slime.rewards", "zzzzzz")
    assert str(caught.value).endswith("; installed: (nothing)")


def test_many_names_are_not_listed(install, registry_of):
    install("acme", "[slime.rewards]\n" + "".join(f"name{n} = acme:f\n" for n in range(20)))
    with pytest.raises(PluginError) as caught:
        registry_of().find("slime.rewards", "zzzzzz")
    assert str(caught.value).endswith("`slime plugins list rewards` shows the 20 that are installed")


def test_name_of_another_group_is_pointed_at(install, registry_of):
    install("acme", "[slime.filters]\nsharp = acme:f\n")
    with pytest.raises(PluginError, match=r"'sharp' exists in slime\.filters"):
        registry_of().find("slime.rewards", "sharp")


def test_one_name_of_two_distributions_is_refused_with_both_spellings(install, registry_of):
    install("acme", REWARDS.format(name="math", value="acme:math"))
    install("zeta", REWARDS.format(name="math", value="zeta:math"))
    registry = registry_of()
    with pytest.raises(PluginError, match="write acme/math or zeta/math"):
        registry.find("slime.rewards", "math")
    assert registry.find("slime.rewards", "zeta/math").value == "zeta:math"


def test_import_reference_and_dotted_path_mean_the_same(registry_of):
    registry = registry_of()
    assert registry.find("slime.rewards", "os.path:join").value == "os.path:join"
    assert registry.find("slime.rewards", "os.path.join").value == "os.path:join"


def test_plugin_that_exits_on_import_is_an_error_too(install, registry_of):
    install("acme", REWARDS.format(name="bad", value="acme_exits:f"), acme_exits="raise SystemExit(0)")
    with pytest.raises(PluginError, match=r"'acme/bad' .* does not import: SystemExit: 0"):
        registry_of().resolve("slime.rewards", "bad")


def test_plugin_that_fails_to_import_is_fatal_when_loaded_only(install, registry_of):
    install(
        "acme", REWARDS.format(name="bad", value="acme_bad:f"), acme_bad="raise OSError('no such library')"
    )
    registry = registry_of()
    plugin = registry.find("slime.rewards", "bad")
    with pytest.raises(PluginError, match=r"'acme/bad' .* does not import: OSError: no such library"):
        registry.load(plugin)


def test_hook_module_that_fails_is_set_aside_by_name(install, registry_of):
    install("acme", "[slime]\nacme = acme_hooks\n", acme_hooks="import not_there_at_all")
    registry = registry_of()
    assert list(registry.hooks.slime_config_sections()) == []
    assert "not_there_at_all" in registry.broken_hooks["acme"]


HOOKS = """
from slime_core.plugins.hooks import hookimpl
@hookimpl
def slime_list_models(): return []
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("@hookimpl\ndef slime_step_end(run, stepp): pass\n", "stepp"),
        ("@hookimpl\ndef slime_step_ended(run, step): pass\n", "unknown hook 'slime_step_ended'"),
        (
            "def slime_step_end(run, step): pass\n",
            "acme_wrong.slime_step_end: found no mark; wanted @hookimpl",
        ),
    ],
    ids=["argument", "name", "mark"],
)
def test_hook_module_with_a_wrong_hook_is_set_aside_whole(install, registry_of, source, why):
    install("acme", "[slime]\nacme = acme_wrong\n", acme_wrong=HOOKS + source)
    install("zeta", "[slime]\nzeta = zeta_right\n", zeta_right=HOOKS)
    registry = registry_of()
    assert registry.hooks.slime_list_models() == [[]]  # zeta's alone
    assert list(registry.broken_hooks) == ["acme"]
    assert why in registry.broken_hooks["acme"]
    assert [plugin["distribution"] for plugin in registry.lock()] == ["zeta"]
    for module in ("acme_wrong", "zeta_right"):
        del sys.modules[module]


def test_allow_list_hides_other_distributions(install, registry_of):
    install("acme-one", REWARDS.format(name="one", value="a:b"))
    install("acme-two", REWARDS.format(name="two", value="a:b"))
    assert [p.name for p in registry_of(allow=["Acme_Two"]).plugins("slime.rewards")] == ["two"]
    assert registry_of(allow=[]).plugins("slime.rewards") == ()


def test_lock_holds_what_was_resolved_with_versions(install, registry_of):
    install("acme", REWARDS.format(name="one", value="a:b"), version="2.3")
    registry = registry_of()
    registry.find("slime.rewards", "one")
    assert registry.lock() == [
        {"group": "slime.rewards", "name": "one", "distribution": "acme", "version": "2.3", "value": "a:b"}
    ]


def test_group_that_does_not_exist_is_refused(registry_of):
    with pytest.raises(PluginError, match=r"no such group: 'slime\.reward'"):
        registry_of().find("slime.reward", "x")
