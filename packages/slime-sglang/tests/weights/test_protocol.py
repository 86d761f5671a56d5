"""What a run and the loaders inside its servers agree on."""

from __future__ import annotations

import pkgutil

from slime_sglang.inside import loader, receiving_loader
from slime_sglang.weights.protocol import LOADERS


def test_the_dotted_paths_of_the_loaders_are_those_of_the_functions():
    assert [pkgutil.resolve_name(path) for path in LOADERS] == [
        loader.check,
        loader.load,
        receiving_loader.receive,
    ]
