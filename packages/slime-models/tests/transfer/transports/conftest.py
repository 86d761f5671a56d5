"""What receives updates in the tests of transports by ranks."""

from __future__ import annotations

import pytest
from slime_models.tensor_spec import Spec
from slime_models.transfer.storage import UpdateStorage

from ..updates import SHAPES


@pytest.fixture
def storage(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    made = UpdateStorage(
        specs={name: Spec(shape=shape, dtype="float32") for name, shape in SHAPES.items()},
        model_path=tmp_path, staging_dir=tmp_path / "staging", disk_dir=tmp_path / "disk", keep_files=False,
        encoding="xor", timeout_s=60, has_ranks=True,
    )  # fmt: skip
    yield made
    assert not made.has_staging
    made.close()
