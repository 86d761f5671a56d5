"""Which features of which families the collected tests prove, by their mark `proves`.

    @pytest.mark.parametrize("kind", ["qwen3", "glm4"])
    @pytest.mark.proves("{kind}", "train", "lora")

says that the test, for each of the two families, proves these features (`slime_models.family.support.FEATURES`). Words in braces
are names of parameters. `{kind}` must be a family's name then; a feature that the family does not have is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime_core.errors import ContractError
from slime_core.plugins.registry import Registry

from slime_models.family.support import FEATURES, applies

if TYPE_CHECKING:
    import pytest


def proofs_of(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """Return model_type -> the features that some of the tests prove.

    Raises:
        ContractError: a mark names a family or a feature that is none.
    """
    registry = Registry()
    families = {
        plugin.name: registry.resolve("slime.models", plugin.name)
        for plugin in registry.plugins("slime.models")
    }
    found: dict[str, set[str]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            continue
        call = getattr(item, "callspec", None)
        for mark in item.iter_markers("proves"):
            name, *features = mark.args
            name = name.format(**({} if call is None else call.params))
            unknown = [feature for feature in features if feature not in FEATURES]
            if name not in families or unknown:
                raise ContractError(
                    f"{item.nodeid}: proves{mark.args}: found {unknown or name}; wanted one of {', '.join(families)}, and "
                    f"features among {', '.join(FEATURES)}"
                )
            applied = {feature for feature in features if applies(families[name], feature)}
            found.setdefault(name, set()).update(applied)
    return found
