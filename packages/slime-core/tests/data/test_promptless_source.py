"""Groups without prompts: their ids, and their state."""

import pytest
from slime_core.data.promptless_source import PromptlessSource
from slime_core.errors import CheckpointError
from slime_core.samples import Sample
from slime_core.testing import contracts


def test_it_keeps_the_contract_of_sources():
    contracts.check_source(lambda: PromptlessSource(3), n_samples_per_prompt=3)


def test_samples_are_empty_and_their_ids_rise():
    source = PromptlessSource(2)
    source.take(3)
    assert source.take(1) == [[Sample(index=6, group_index=3), Sample(index=7, group_index=3)]]
    assert len(source) == 0


def test_groups_of_another_size_are_refused():
    with pytest.raises(CheckpointError, match=r"groups of 2 samples .* --n-samples-per-prompt 2"):
        PromptlessSource(3).restore(PromptlessSource(2).state())
