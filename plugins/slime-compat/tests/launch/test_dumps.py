"""Dumps of rollouts: in the reference's format, read back as they were, and another's code is never run."""

from __future__ import annotations

import pickle

import pytest
import torch
from slime_compat.launch.dumps import read_dump, write_dump
from slime_core.errors import DataError
from slime_core.samples import Sample, Status


def sample(index: int, group: int) -> Sample:
    return Sample(
        index=index, group_index=group, prompt="a", tokens=[5, 6, 7], response="bc", response_length=2, label="1", reward={"score": 1.0},
        loss_mask=[1, 0], rollout_log_probs=[-0.1, 0.0], status=Status.COMPLETED, metadata={"k": 1}, weight_versions=["3"],
        weight_version_starts=[0], environment_spans=[[1, 2]],
    )  # fmt: skip


def test_a_dump_is_theirs_and_comes_back_as_ours(tmp_path):
    groups = [[sample(0, 0), sample(1, 0)], [sample(2, 1)]]
    path = write_dump(f"{tmp_path}/dumps/{{rollout_id}}.pt", 4, groups)
    assert path.name == "3.pt"
    held = torch.load(path, weights_only=True)
    assert (
        held["rollout_id"] == 3
        and held["samples"][0]["status"] == "completed"
        and held["samples"][1]["tokens"] == [5, 6, 7]
    )
    assert read_dump(path) == groups


def test_what_the_reference_adds_to_a_sample_becomes_metadata(tmp_path):
    row = {"index": 0, "group_index": 0, "tokens": [1, 2], "response_length": 1, "response": "x", "status": "truncated", "reward": 1.0,
           "own_attribute": 7, "trace": {"spans": []}}  # fmt: skip
    torch.save({"rollout_id": 0, "samples": [row]}, tmp_path / "0.pt")
    ((found,),) = read_dump(tmp_path / "0.pt")
    assert found.metadata == {"own_attribute": 7} and found.status is Status.TRUNCATED


class Evil:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize("content", [b"", pickle.dumps({"samples": Evil()}), b"PK\x03\x04"])
def test_a_file_that_is_no_dump_is_refused_and_runs_nothing(tmp_path, capsys, content):
    (tmp_path / "0.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"0\.pt: found"):
        read_dump(tmp_path / "0.pt")
    with pytest.raises(DataError, match="found no file"):
        read_dump(tmp_path / "1.pt")
    assert "ran" not in capsys.readouterr().out
