"""What a run and the loaders inside its servers agree on."""

from __future__ import annotations

import pkgutil

from slime_sglang.inside import loader, receiving_loader
from slime_sglang.weights.apply import Ranks, merged_fingerprints
from slime_sglang.weights.protocol import LOADERS, LoaderRequest


def test_the_dotted_paths_of_the_loaders_are_those_of_the_functions():
    assert [pkgutil.resolve_name(path) for path in LOADERS] == [
        loader.check,
        loader.load,
        receiving_loader.receive,
    ]


def test_ranks_of_a_later_stage_answer_elsewhere_and_come_behind_those_of_the_first():
    first = LoaderRequest(folder="f", answer="a", rank=1, n_ranks=2, n_stages=3, group_rank=6)
    assert (first.at_stage(0), first.at_stage(2).at_stage(0).group_rank) == (first, 6)
    third = first.at_stage(2)
    assert (third.stage, third.answer, third.group_rank) == (2, "a-stage-2", 6 + 2 * 2)


def test_a_tensor_is_held_that_all_ranks_of_a_stage_hold():
    """Two stages of two ranks, with half of the stage's experts each; the embedding is in both stages."""
    expert = "layers.{}.experts.{}.up_proj.weight"
    sent = dict.fromkeys(("embedding", "a", "b", *(expert.format(i, i) for i in range(4))), 1)
    held = [
        {"embedding": 1, "a": 1, expert.format(0, 0): 1},
        {"embedding": 1, "a": 1, expert.format(1, 1): 1},
        {"embedding": 1, "b": 1, expert.format(2, 2): 1},
        {"embedding": 1, "b": 1, expert.format(3, 3): 1},
    ]
    ranks = Ranks(count=2, expert_groups=2, stages=2)
    assert merged_fingerprints(held, sent, ranks) == sent
    held[3]["embedding"] = 7  # which the first stage has right
    del held[1]["a"]
    assert merged_fingerprints(held, sent, ranks) == {
        name: value for name, value in (sent | {"embedding": 7}).items() if name != "a"
    }
