"""Every flag of the reference system has a fate, and each fate is what it says."""

from __future__ import annotations

import pytest
from slime_compat.flags.fate import refused
from slime_compat.flags.former import FORMER
from slime_compat.flags.megatrons import MEGATRONS
from slime_compat.flags.names import NAMES
from slime_compat.flags.pages import verdict
from slime_compat.flags.theirs import THEIRS
from slime_compat.launch.rules import DEALT_WITH
from slime_core.config.parsing.flags import is_known
from slime_core.config.parsing.schema import build_schema
from slime_core.plugins.registry import Registry

ALL = [name for names in NAMES.values() for name in names]


@pytest.fixture(scope="module")
def schema():
    return build_schema(Registry.from_environment())


def test_no_flag_is_listed_twice_and_every_fate_is_of_a_flag():
    assert len(ALL) == len(set(ALL)) == 237
    assert set(THEIRS) - set(ALL) == {"ckpt_step"}  # Megatron's own, of the folder of --load


def test_every_flag_is_slimes_own_or_has_a_fate(schema):
    lost = [name for name in ALL if name not in THEIRS and not is_known(name, schema)]
    assert lost == []


def test_a_flag_that_is_mapped_has_a_setting_that_is_there_or_a_rule(schema):
    for name, fate in {**THEIRS, **MEGATRONS, **FORMER}.items():
        if fate.kind == "mapped":
            assert (fate.to is not None and is_known(fate.to, schema)) != (name in DEALT_WITH), name
        else:
            assert fate.what and (name not in DEALT_WITH or fate.kind == "refused"), name


def test_a_flag_that_slime_has_by_now_is_taken_in_the_place_of_a_refusal(schema):
    assert verdict("eval_function_path", refused("not here"), schema)[0] == "accepted"
    assert verdict("release_train", THEIRS["release_train"], schema) == (
        "refused", "ranks live as long as the run; use --offload-train, which moves their state to the host"
    )  # fmt: skip
