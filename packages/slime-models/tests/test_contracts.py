"""Our own families and tokenizer keep the promises of their kinds, and the kit tells what breaks one."""

from __future__ import annotations

import dataclasses

import pytest
from slime_core.errors import ContractError
from slime_core.plugins.registry import Registry
from slime_core.testing import contracts
from slime_models.family.families.llama import LLAMA
from slime_models.hf.tokenizer import load_tokenizer
from slime_models.testing import check_family

from .conftest import tiny_config


@pytest.mark.parametrize(
    "plugin", contracts.plugins_of("slime-models"), ids=lambda plugin: f"{plugin.group}/{plugin.name}"
)
def test_every_plugin_of_this_package_keeps_its_promises(plugin):
    registry = Registry()
    contracts.check_plugin(registry, plugin)
    if plugin.group == "slime.models":
        for tied in (True, False):
            check_family(registry.load(plugin), tiny_config(plugin.name, tie_word_embeddings=tied))


def test_the_tokenizer_of_a_folder_keeps_its_promises(smollm2):
    contracts.check_tokenizer(load_tokenizer(smollm2), ["1 + 1 = 2", "Grüße, 世界\n"])


def turned(rule):
    """Return the rule with its first part given back upside down."""

    def unpack(tensor, architecture):
        first, *others = rule.layout.unpack(tensor, architecture)
        return [first.flip(0), *others]

    return dataclasses.replace(rule, layout=dataclasses.replace(rule.layout, unpack=unpack))


def test_a_family_that_loses_or_changes_a_tensor_is_told():
    config = tiny_config("llama", tie_word_embeddings=False)
    with pytest.raises(ContractError, match=r"found a config.json of 'llama'; wanted one of its own"):
        check_family(dataclasses.replace(LLAMA, model_type="other"), config)
    with pytest.raises(ContractError, match="family llama: found a model without weights"):
        check_family(dataclasses.replace(LLAMA, rules=()), config)
    with pytest.raises(ContractError, match=r"weight.* changed; wanted the same numbers"):
        check_family(dataclasses.replace(LLAMA, rules=tuple(map(turned, LLAMA.rules))), config)
    with pytest.raises(ContractError, match=r"config.json: found DataError"):
        check_family(LLAMA, {"model_type": "llama"})
