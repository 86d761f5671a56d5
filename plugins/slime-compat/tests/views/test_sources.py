"""Data sources of a user's own that derive from the reference system's."""

from __future__ import annotations

import types

import pytest
from slime_compat.adapters.source import SourceOfTheirs
from slime_compat.views.running.building import _BUILDING
from slime_compat.views.samples.sources import RolloutDataSource, RolloutDataSourceWithBuffer
from slime_core.data.prompt_source import PromptSource
from slime_core.samples import Sample

IDS = [9, 7, 7, 9, 104, 105]


class OwnFile(RolloutDataSource):
    """Writes its position itself."""

    def save(self, rollout_id):
        """Write it."""
        super().save(rollout_id)


@pytest.fixture
def source_of():
    """Return a function that returns the source of a class over five prompts, whose run has a folder."""

    def source_of(own, folder, *, images=None):
        prompts = [Sample(prompt=f"<image>{i}", tokens=list(IDS), multimodal_inputs=images) for i in range(5)]
        _BUILDING.set(types.SimpleNamespace(prompts=lambda: PromptSource(prompts, n_samples_per_prompt=2)))
        rollout = types.SimpleNamespace(n_samples_per_prompt=2)
        build = types.SimpleNamespace(
            tokenizer=types.SimpleNamespace(encode=lambda text: [ord(one) for one in text]),
            settings=types.SimpleNamespace(rollout=rollout),
        )
        args = types.SimpleNamespace(
            rollout_global_dataset=True,
            prompt_data=["x"],
            n_samples_per_prompt=2,
            save=str(folder),
            load=str(folder),
        )
        return SourceOfTheirs(own(args), build, who="own source")

    return source_of


def prompts_of(groups):
    return [group[0].prompt for group in groups]


@pytest.mark.parametrize("own", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_another_run_goes_on_where_one_was(source_of, tmp_path, own):
    first, other = source_of(own, tmp_path / "a"), source_of(own, tmp_path / "b")
    first.take(2)
    state = first.state()
    other.restore(state)
    assert prompts_of(other.take(2)) == prompts_of(first.take(2)) == ["<image>2", "<image>3"]
    assert not (tmp_path / "a").exists()  # the position is in the checkpoint


def test_groups_that_wait_go_on_with_it(source_of, tmp_path):
    first, other = (source_of(RolloutDataSourceWithBuffer, tmp_path / name) for name in "ab")
    waiting = first.take(1)
    first._theirs.add_samples(waiting)
    other.restore(first.state())
    assert prompts_of(other.take(2)) == ["<image>0", "<image>1"]


def test_a_class_that_writes_its_position_itself_does(source_of, tmp_path):
    first = source_of(OwnFile, tmp_path)
    first.take(1)
    assert first.state() == {"taken": 1}
    again = source_of(OwnFile, tmp_path)
    again.restore({"taken": 1})
    assert prompts_of(again.take(1)) == ["<image>1"]


def test_ids_of_a_prompt_with_images_stay(source_of, tmp_path):
    images = {"image": ["data:image;base64,AA"]}
    ((seen, _),) = source_of(RolloutDataSource, tmp_path, images=images).take(1)
    ((text, _),) = source_of(RolloutDataSource, tmp_path).take(1)
    assert seen.tokens == IDS
    assert text.tokens == [ord(one) for one in "<image>0"]
