"""Conversations that come to the end of the engine's context end there, in training and in evaluations, whatever the settings say."""

from __future__ import annotations

import pytest

from ..test_loop import train
from .test_sample_hooks import samples


@pytest.mark.parametrize("flags", [[], ["--rollout-max-context-len", "6"]])
def test_a_conversation_ends_where_the_engine_has_no_room_for_more(letters, tmp_path, flags):
    flags = ["--rollout-engine", "letters.narrow:create_engine", "--rollout-max-response-len", "4", *flags]
    flags += ["--custom-generate-function-path", "letters.narrow:reads_first", "--num-rollout", "1"]
    train(letters, *flags)
    for kind, most in (("step_", 6 if len(flags) > 8 else 7), ("eval_", 7)):
        lengths = {len(sample["tokens"]) for sample in samples(tmp_path / "runs/letters", kind)}
        assert max(lengths) == most
