"""`translate`: the arguments of the reference system's launch scripts as settings of slime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from slime_core.config.parsing.flags import is_known
from slime_core.config.parsing.schema import Schema
from slime_core.config.parsing.translation import Translation
from slime_core.errors import Problem

from slime_compat.flags.fate import Fate
from slime_compat.flags.former import FORMER
from slime_compat.flags.megatrons import MEGATRONS
from slime_compat.flags.theirs import THEIRS
from slime_compat.launch.debugging import debugging
from slime_compat.launch.made import Made
from slime_compat.launch.rules import DEALT_WITH, RULES, custom_config, one_value
from slime_compat.launch.script import PROGRAMS, read_script

#: What `slime config show` says of values that follow from the script, or are the reference's defaults.
ORIGIN = "preset slime"
#: Its defaults where slime's are others: section -> setting -> value.
DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"launcher": "ray"},
    "rollout": {"rollout_engine": "sglang"},
    "cluster": {"actor_num_gpus_per_node": 8, "num_gpus_per_node": 8},
    "train": {"weight_decay": 0.01, "adam_beta2": 0.999, "lr_decay_style": "linear"},
    "megatron": {"use_distributed_optimizer": True},
    "compat": {"reference_metrics": True},
}


def translate(words: Sequence[str], schema: Schema) -> Translation | None:
    """Return what a command line of the reference system means here; None for one of slime's own.

    Args:
        words: behind the name of the command.
        schema: what can be set here.
    """
    script = read_script(words)
    if script is None:
        return None
    known = partial(is_known, schema=schema)
    made = Made(script, {table: dict(fields) for table, fields in DEFAULTS.items()}, known=known)
    made.put("run", "loop", PROGRAMS[script.program])
    if script.value("optimizer") not in (None, "adam"):
        made.defaults["megatron"].pop("use_distributed_optimizer")
    custom_config(made)
    one_value(made)
    debugging(made)
    for rule in RULES:
        rule(made)
    _fates(made)
    return Translation(
        origin=ORIGIN,
        recipes=tuple(script.recipes),
        flags=tuple(script.words()),
        defaults=made.defaults,
        environment=made.environment,
        notes=made.notes,
        warnings=made.warnings,
        problems=made.problems,
    )


def _fates(made: Made) -> None:
    """Deal with what is left by the tables of flags."""
    script = made.script
    for name in list(script.flags):
        fate = fate_of(name)
        if fate is None or name in DEALT_WITH or (fate.until_ours and made.known(name)):
            continue
        given = script.flags.pop(name)
        if fate.kind == "mapped":
            assert fate.to is not None
            script.flags[fate.to] = given
            if fate.to != name:
                made.note(name, fate.what)
        elif fate.kind == "refused":
            made.problems.append(_refusal(name, given, fate))
        elif fate.values and given and given[0] not in fate.values:
            made.refuse(name, " ".join(given), " or ".join(fate.values), fate.what)
        else:
            made.note(name, f"nothing to do: {fate.what}")


def fate_of(name: str) -> Fate | None:
    """Return what becomes of a flag of the reference, or of Megatron or SGLang; None for one that is slime's own."""
    fate = THEIRS.get(name) or MEGATRONS.get(name) or FORMER.get(name)
    return MEGATRONS.get(name.removeprefix("no_")) if fate is None and name.startswith("no_") else fate


def _refusal(name: str, given: Sequence[str], fate: Fate) -> Problem:
    found = " ".join(given) or "it"
    wanted = f"nothing: {fate.what}"
    return Problem(
        f"--{name.replace('_', '-')}",
        found,
        wanted,
        f"use {fate.instead}" if fate.instead else "drop the flag",
    )
