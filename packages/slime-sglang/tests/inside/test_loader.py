"""What a loader leaves in a server's process after an update, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slime_models.tensor_spec import Spec
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.staging import WEIGHTS, StagingFolder
from slime_sglang.inside.loader import check, load
from slime_sglang.weights.protocol import LoaderRequest, read_result


class Model(torch.nn.Linear):
    """A model of one matrix, loaded as SGLang loads them."""

    def load_weights(self, tensors):
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def mapped(folder):
    """How often this process has the staged weights mapped."""
    return sum(str(folder / WEIGHTS) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("keeps", [True, False])
def test_the_memory_of_an_update_stays_mapped_only_where_it_is_to(tmp_path, keeps):
    folder = tmp_path / "update"
    staging = StagingFolder(folder, specs={"weight": Spec(shape=(40, 30), dtype="float32")})
    request = LoaderRequest(folder=str(folder), answer=str(tmp_path / "answer"), keeps=keeps)
    model = Model(30, 40, bias=False)
    for version in range(3):
        new = torch.full((40, 30), float(version))
        staging.begin(str(version))
        staging.put([("weight", new)], {})
        staging.seal()
        for call in (check, load):
            call(model, [(request.text(), torch.empty(0))])
            result = read_result(tmp_path / "answer")
            assert result.error is None
        assert result.held == {"weight": fingerprint(new)}
        assert model.weight.equal(new)
        assert mapped(folder) == 1 + keeps  # the staging folder has it mapped, too
