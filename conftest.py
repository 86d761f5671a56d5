"""What the marks of the whole repository mean, and which tests stay together when several processes run them."""

from __future__ import annotations

import pytest

#: Fixtures that cost a minute or more: the tests that use one share a process.
_COSTLY = ("serving", "pair")


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """With `pytest -n 2`: keep the tests of a file together, and those of a costly fixture."""
    fixtures = getattr(item, "fixturenames", ())
    name = next((fixture for fixture in _COSTLY if fixture in fixtures), str(item.path))
    item.add_marker(pytest.mark.xdist_group(name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; nothing else is ever skipped."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
